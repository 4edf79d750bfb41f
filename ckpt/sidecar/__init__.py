"""A node's data process: owns the arenas, exchanges parity, serves shards, writes checkpoints."""
