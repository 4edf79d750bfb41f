"""Checkpoints read without a model: slices, differences, statistics."""
