"""Writes protected snapshots to the store."""
