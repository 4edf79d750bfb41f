"""Environments in processes of their own, with limits, which are killed and started again."""
