"""The disk tier: a sidecar spills protected snapshots to its node's own disk."""
