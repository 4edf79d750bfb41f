"""Snapshots in shared memory: arenas, slots, blocks, and the records that describe them."""
