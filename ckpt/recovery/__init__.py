"""Recovery: snapshots read back from memory, from peers, from parity and from disks."""
