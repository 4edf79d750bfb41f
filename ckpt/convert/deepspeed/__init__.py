"""Checkpoints of DeepSpeed: ZeRO and universal directories as sources, universal ones as a sink.

Nothing here imports DeepSpeed. See docs/how-to/deepspeed.md.
"""
