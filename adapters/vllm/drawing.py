"""Tokens that given noise picks from logits, on the device of the logits."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn(logits: Tensor, noise: Tensor) -> Tensor:
    """Return the tokens [rows] that ``noise`` [rows] picks from ``logits`` [rows, vocabulary].

    `holdfast.adapters.rl.samples.noise.choose` on the logits' device; logits that are minus
    infinity are never picked.
    """
    wide = logits.double()
    cumulative = (wide - wide.amax(dim=1, keepdim=True)).exp_().cumsum(dim=1)
    limits = (noise * cumulative[:, -1])[:, None]
    below = torch.searchsorted(cumulative, limits, right=True)[:, 0]
    return below.clamp_(max=logits.shape[1] - 1)
