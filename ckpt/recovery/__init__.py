"""Read snapshots back out of the sidecars."""
