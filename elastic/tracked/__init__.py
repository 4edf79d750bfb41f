"""The tracked state during one generation: restored, snapshotted, saved."""
