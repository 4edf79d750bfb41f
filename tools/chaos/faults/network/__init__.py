"""Faults of networks and wires."""
