"""Persistence: a sidecar writes protected snapshots to the store as checkpoints."""
