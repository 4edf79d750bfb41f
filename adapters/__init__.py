"""Adapters that connect Holdfast to torch.distributed.checkpoint and to reinforcement learning."""
