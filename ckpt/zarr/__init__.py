"""Zarr-python's view of a checkpoint."""
