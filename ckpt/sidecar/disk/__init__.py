"""Spills snapshots to the node's own disk."""
