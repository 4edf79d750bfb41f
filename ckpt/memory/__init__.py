"""Snapshots in shared memory: slots, blocks, and the records that describe them."""
