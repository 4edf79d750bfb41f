"""The adapter for accelerate: checkpoints of all that an Accelerator has prepared.

`AcceleratorCheckpoints` saves and loads models, optimizers, schedulers, registered objects, random
states and the positions of data loaders in Holdfast's format. See docs/how-to/accelerate.md.
"""

from holdfast.adapters.accelerate.checkpoints import AcceleratorCheckpoints

__all__ = ["AcceleratorCheckpoints"]
