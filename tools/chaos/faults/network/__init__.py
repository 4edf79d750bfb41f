"""Faults of networks and of single connections."""
