"""The side that trains."""
