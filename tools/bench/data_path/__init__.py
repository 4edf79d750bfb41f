"""Benchmarks of the data path: snapshot, persist, restore, parity, memory."""
