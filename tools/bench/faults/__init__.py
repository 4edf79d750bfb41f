"""Benchmarks of faults: time to recover, joins, goodput, and the same of other tools."""
