"""Holdfast's training loop: `resilient` keeps a training function alive.

Names are loaded when first used, so that processes without torch may import this package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
