"""Breaking training jobs on purpose, and judging what it meant for the training.

A loop of any kind tells what it does by three calls, which cost nothing where nobody asked::

    from holdfast.tools import chaos

    for step in range(start, steps):
        chaos.samples(step, ids)
        ...  # train on them
        chaos.step(step)
        chaos.state_hash(step, model.state_dict())
"""

from holdfast.tools.chaos.hooks import samples, state_hash, step

__all__ = ["samples", "state_hash", "step"]
