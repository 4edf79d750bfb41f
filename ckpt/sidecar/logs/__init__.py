"""Record logs of rollout workers and their copies."""
