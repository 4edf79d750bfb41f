"""Sources of shards and of HTTP faults, for benchmarks, chaos runs and tests."""
