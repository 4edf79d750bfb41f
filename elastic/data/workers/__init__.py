"""Worker processes that load data."""
