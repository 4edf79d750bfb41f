"""Read a checkpoint without a model: slices, differences, statistics."""
