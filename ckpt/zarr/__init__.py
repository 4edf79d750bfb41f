"""A checkpoint as a read-only group of zarr-python."""
