"""Scenarios: their parts, the catalogue of faults, and the ready ones."""
