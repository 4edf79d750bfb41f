"""A node's data process: owns the arenas, exchanges parity, serves blocks, writes checkpoints."""
