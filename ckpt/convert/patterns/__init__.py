"""Patterns: foreign layouts of tensors as data, between the source and the sink of a conversion."""
