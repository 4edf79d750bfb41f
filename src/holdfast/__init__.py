"""Holdfast keeps PyTorch training alive.

`resilient` wraps a training loop; `save`, `load` and `open` handle checkpoints without it. The
names are listed in `__init__.pyi` and imported when they are first used, so that processes which
need no torch (the sidecar, the agent) import none.
"""

import lazy_loader

from holdfast.elastic.loop.uncaught.hook import watch_worker

watch_worker()
del watch_worker
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
