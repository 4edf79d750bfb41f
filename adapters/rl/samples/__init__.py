"""Tokens, trajectories, and the logs that keep them when a rollout worker dies."""
