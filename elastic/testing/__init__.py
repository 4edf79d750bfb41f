"""Fakes, strategies and the simulator, for tests of this package and of its extensions."""
