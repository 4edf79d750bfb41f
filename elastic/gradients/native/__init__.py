"""Compiled sums of gradients, and their Python side."""
