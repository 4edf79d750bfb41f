"""The adapter for Lightning: the checkpoints of Fabric and of the Trainer in Holdfast's format.

`holdfast_strategy` gives a strategy these checkpoints; `random_states` is an entry of Fabric's
state for the random generators. See docs/how-to/lightning.md.
"""

from holdfast.adapters.lightning.making import holdfast_strategy
from holdfast.adapters.lightning.randomness import random_states

__all__ = ["holdfast_strategy", "random_states"]
