"""Fault-tolerant reinforcement learning: rollout workers sample, trainers learn."""
