"""The benchmark of islands: beside DDP, on lines of limited bandwidth."""
