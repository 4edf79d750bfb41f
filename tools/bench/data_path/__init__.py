"""Benchmarks of bytes: snapshot, persist, restore, parity, memory."""
