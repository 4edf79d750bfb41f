"""Worker processes that load data, and end with their rank."""
