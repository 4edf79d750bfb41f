"""Advantages, ratios, the PPO loss."""
