"""`holdfast demo`."""
