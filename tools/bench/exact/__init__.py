"""The benchmark of exact sums."""
