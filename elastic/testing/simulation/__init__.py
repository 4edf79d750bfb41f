"""Whole jobs on virtual time: production decisions, random faults and invariants."""
