"""Tokens, trajectories, and the log they survive in."""
