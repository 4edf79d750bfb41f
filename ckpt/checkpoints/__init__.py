"""Checkpoints below a root directory: written, committed, listed, opened, verified and pruned."""
