"""Holdfast's checkpoints: save, load and open the state of a training job.

The names below are imported when they are first used, so that ``from holdfast import ckpt`` (which
the sidecar and the agent do) does not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
