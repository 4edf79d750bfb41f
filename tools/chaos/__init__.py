"""Faults for training jobs, and a checker that judges the effect on the training.

A training loop of any kind reports its work by three calls, which cost nothing unless a history is
requested::

    from holdfast.tools import chaos

    for step in range(start, steps):
        chaos.samples(step, ids)
        ...  # train on them
        chaos.step(step)
        chaos.state_hash(step, model.state_dict())
"""

from holdfast.tools.chaos.hooks import samples, state_hash, step

__all__ = ["samples", "state_hash", "step"]
