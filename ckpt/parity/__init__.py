"""Parity between nodes: groups, stripes, erasure codes and the memory they need."""
