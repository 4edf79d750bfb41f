"""Where a run's samples come from: orders, loaders, worker processes, iterable data sets."""
