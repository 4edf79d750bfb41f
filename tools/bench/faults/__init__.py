"""Sections about faults: mttr, join, goodput, and the peers."""
