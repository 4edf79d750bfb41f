"""The samples of a run: orders, loaders, worker processes and iterable data sets."""
