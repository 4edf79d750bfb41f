"""The section about exact sums."""
