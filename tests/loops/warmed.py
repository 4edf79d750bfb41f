"""Imported by the server of ranks before it forks: all that a traced run imports on the way."""

import torch

from holdfast.elastic.loop.trace import traced_run

torch.optim.SGD([torch.zeros(1)], lr=0.0)  # its first use imports for a second

__all__ = ["traced_run"]
