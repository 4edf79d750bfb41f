"""The side that samples."""
