"""The RL loss: advantages, importance ratios and the clipped objective of PPO."""
