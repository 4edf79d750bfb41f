"""Parity rows: built from the columns of other nodes, and held for them."""
