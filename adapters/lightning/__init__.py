"""The adapter for Lightning Fabric: ``fabric.save`` and ``fabric.load`` in Holdfast's format.

`holdfast_strategy` gives a strategy of Fabric these checkpoints; `random_states` is an entry of a
state for the random generators. See docs/how-to/lightning.md.
"""

from holdfast.adapters.lightning.making import holdfast_strategy
from holdfast.adapters.lightning.randomness import random_states

__all__ = ["holdfast_strategy", "random_states"]
