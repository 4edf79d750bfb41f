"""Adapters that connect Holdfast to other libraries, and the library for reinforcement learning."""
