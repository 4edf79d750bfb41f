"""Whole jobs on virtual time."""
