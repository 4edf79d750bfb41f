"""Errors that leave the decorated function: how they are printed, and whether a retry helps."""
