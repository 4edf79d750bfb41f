"""The benchmark of islands: beside DDP between the same processes, on lines of limited bandwidth."""
