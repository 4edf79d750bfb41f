"""Losses of several nodes at once: predicted by simulation, measured with real processes."""
