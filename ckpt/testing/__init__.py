"""Helpers for tests of code that saves and restores state."""
