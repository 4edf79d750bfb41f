"""The setting that allows a lost stage to be set from its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.ckpt import checks
from holdfast.elastic.errors import ConfigError

_NEIGHBORS: Final[Mapping[str, checks.Rule]] = {
    "beyond": checks.count(1, remedy="give 1 or more steps"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbors:
    """A stage that is lost beyond the parity is set from the stages beside it, and marked.

    It becomes their mean, layer by layer, without optimizer state; the first and the last stage
    become a copy of their one neighbour. All other stages keep their newest common step. That
    happens only if every restore point, in memory, on disks and in the store, is more than
    ``beyond`` steps older; otherwise the run goes back, and nothing is approximate.
    """

    beyond: int = 100

    def __post_init__(self) -> None:
        checks.check_fields(self, _NEIGHBORS, error=ConfigError)
