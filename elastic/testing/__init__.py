"""Fakes, strategies and the simulator, for this package's tests and for those who extend it."""
