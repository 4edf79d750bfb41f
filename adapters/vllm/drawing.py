"""Tokens that given noise picks from logits, on the device of the logits."""

from __future__ import annotations

from torch import Tensor


def drawn(logits: Tensor, noise: Tensor) -> Tensor:
    """Return the tokens [rows] that ``noise`` [rows] picks from ``logits`` [rows, vocabulary].

    `holdfast.adapters.rl.samples.noise.choose` on the logits' device; logits that are minus
    infinity are never picked.
    """
    wide = logits.double()
    cumulative = (wide - wide.amax(dim=1, keepdim=True)).exp_().cumsum(dim=1)
    below = cumulative <= (noise * cumulative[:, -1])[:, None]
    return below.sum(dim=1).clamp_(max=logits.shape[1] - 1)
