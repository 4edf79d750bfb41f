"""Weights of low precision for sampling, made from a policy's own: a pure function of them.

The weights of the linear layers inside a policy's layers are rounded to few values for each row of
outputs, with one scale each, and are multiplied out again (weight-only quantization, emulated).
Embeddings, norms, biases and the head keep their precision. So the samples, and their recorded
log-probabilities, are those of an engine that holds such weights; it is not faster.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor, nn

from holdfast.adapters.rl.policy.policy import Policy
from holdfast.elastic.errors import ConfigError

Precision = Literal["full", "int8", "int4", "float8"]
"""The weights that rollout workers sample with.

``full``: those of the version. ``int8``, ``int4``: 255 or 15 evenly spaced values, ``float8``: the
values of `torch.float8_e4m3fn`; the largest of a row is kept.
"""

_LARGEST: Final = {"int8": 127.0, "int4": 7.0, "float8": 448.0}


@torch.no_grad()
def round_weights(policy: Policy, precision: Precision) -> None:
    """Round the weights of a policy in place, the same on every machine of a kind.

    Raises ``ConfigError`` for a policy without linear layers of the usual kind.
    """
    if precision == "full":
        return
    found = [part for layer in policy.layers() for part in layer.modules()]
    linear = [part for part in found if isinstance(part, nn.Linear)]
    if not linear:
        raise ConfigError(
            f"rollout_precision {precision!r}: the layers of a {type(policy).__name__} have no "
            "linear layers to round; set it to 'full'"
        )
    for part in linear:
        part.weight.copy_(rounded(part.weight, precision))


def rounded(weight: Tensor, precision: Precision) -> Tensor:
    """Return ``weight`` [outputs, inputs] with each row rounded; same dtype."""
    if precision == "full":
        return weight
    largest, values = _LARGEST[precision], weight.float()
    scale = values.abs().amax(1, keepdim=True) / largest
    scale = torch.where(scale > 0, scale, 1.0)
    levels = (values / scale).clamp(-largest, largest)
    is_float = precision == "float8"
    levels = levels.to(torch.float8_e4m3fn).float() if is_float else levels.round()
    return (levels * scale).to(weight.dtype)
