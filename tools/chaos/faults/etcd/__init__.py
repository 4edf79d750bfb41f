"""Faults of the coordinator."""
