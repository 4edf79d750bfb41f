"""The settings of the balance between trainers and rollout workers. A pure value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from holdfast.ckpt import checks
from holdfast.ckpt.errors import ArgumentError

_RULES: Final[Mapping[str, checks.Rule]] = {
    "window": checks.count(2, remedy="give 2 or more steps"),
    "least_gain": checks.number(0.01, 0.9, remedy="give a share from 0.01 to 0.9"),
}


class BalanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for moving workers between training and sampling.

    The shares of waiting are measured over ``window`` steps. A worker moves if a step should then
    take less time by the share ``least_gain`` of it.
    """

    window: int = 8
    least_gain: float = 0.1

    def __post_init__(self) -> None:
        checks.check_fields(self, _RULES, error=ArgumentError)
