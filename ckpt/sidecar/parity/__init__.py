"""Builds and holds the parity rows."""
