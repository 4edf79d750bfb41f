"""Parts that all object stores share: retries, limits, threads and ranges."""
