"""The adapter for Lightning: `fit` in Holdfast's loop, and checkpoints in Holdfast's format.

`fit` trains a LightningModule on ranks that may be lost. `holdfast_strategy` gives a strategy of
Fabric or of the Trainer Holdfast's checkpoints; `random_states` is an entry of Fabric's state for
the random generators. See docs/how-to/lightning.md.
"""

from holdfast.adapters.lightning.fitting.entry import fit
from holdfast.adapters.lightning.making import holdfast_strategy
from holdfast.adapters.lightning.randomness import random_states

__all__ = ["fit", "holdfast_strategy", "random_states"]
