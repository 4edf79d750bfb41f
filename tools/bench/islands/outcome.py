"""The outcome that a training process of the benchmark writes."""

from __future__ import annotations

import msgspec

from holdfast.ckpt.types import learn


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps after the first and their seconds, and the loss on held-out windows.

    ``digest`` is that of the weights, empty where they are not compared.
    """

    steps: int
    seconds: float
    parameters: int
    held_out: float
    digest: str = ""


learn(globals())
