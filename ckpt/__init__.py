"""Holdfast's checkpoints: save, load and open the state of a training job.

The names below are imported at their first use, so that ``from holdfast import ckpt`` (in the
sidecar and the agent) does not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
