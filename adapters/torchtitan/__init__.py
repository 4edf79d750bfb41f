"""The adapter for torchtitan: its trainer's checkpoints in Holdfast's format.

`holdfast_checkpoints` gives the configuration of torchtitan's checkpoint manager another manager
with the same settings. `holdfast.adapters.torchtitan.override.checkpoints` does so from the command
line. See docs/how-to/torchtitan.md.
"""

from holdfast.adapters.torchtitan.making import holdfast_checkpoints

__all__ = ["holdfast_checkpoints"]
