"""Replay of trained groups: the groups that are kept, and those that a step takes again. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import msgspec

from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.ckpt import checks
from holdfast.ckpt.errors import ArgumentError
from holdfast.ckpt.types import Json

Policy = Literal["none", "recent", "prioritized"]
"""The trained groups that are taken again.

``recent``: those trained last, the least used of them first. ``prioritized``: those with the
largest spread of rewards, measured as standard deviation divided by how often the group was used,
so those with the largest advantages. A group whose rewards are all equal teaches nothing, and is
left out (in the spirit of Schaul et al., "Prioritized Experience Replay", without its randomness).
"""

_SHARE: Final = checks.number(0, 1, above=True, remedy="give a share above 0 and below 1")
_RULES: Final[Mapping[str, checks.Rule]] = {
    "policy": checks.one_of(*get_args(Policy)),
    "share": lambda value: _SHARE(value) or ("give a share below 1" if value == 1 else ""),
    "max_age": checks.count(1, remedy="give 1 or more steps"),
    "capacity": checks.count(1, remedy="give 1 or more groups"),
}


class ReplayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``share`` of each step's groups are reused ones, trained first at most ``max_age`` steps ago.

    At most ``capacity`` groups are kept for that; with policy ``none`` no group is.
    """

    policy: Policy = "none"
    share: float = 0.25
    max_age: int = 4
    capacity: int = 64

    def __post_init__(self) -> None:
        checks.check_fields(self, _RULES, error=ArgumentError)

    def reused(self, groups: int) -> int:
        """Return how many of a step's ``groups`` groups are reused ones, once enough are kept."""
        return 0 if self.policy == "none" else int(groups * self.share)


@dataclass(slots=True, kw_only=True)
class _Kept:
    samples: tuple[Trajectory, ...]
    step: int
    spread: float
    uses: int = 1


class Replay:
    """The trained groups by ordinal, with how often each was trained on."""

    def __init__(self, config: ReplayConfig, *, count: int) -> None:
        self._config, self._count = config, count
        self._kept: dict[int, _Kept] = {}
        self._gone: Counter[int] = Counter()

    def choose(self, step: int) -> list[int]:
        """Return the ordinals that ``step`` takes again, the first choice first."""
        return sorted(
            (
                ordinal
                for ordinal, each in self._kept.items()
                if step - each.step <= self._config.max_age
                and (each.spread > 0 or self._config.policy == "recent")
            ),
            key=self._rank,
        )[: self._count]

    def samples(self, ordinal: int) -> tuple[Trajectory, ...]:
        """Return the samples of a group that is kept."""
        return self._kept[ordinal].samples

    def train(
        self,
        step: int,
        fresh: Mapping[int, Sequence[Trajectory]],
        rewards: Mapping[int, Sequence[float]],
    ) -> None:
        """Record that ``step`` trained on the ``fresh`` groups, and on those it took again."""
        for ordinal in self.choose(step):
            self._kept[ordinal].uses += 1
        if self._config.policy == "none":
            return
        for ordinal, samples in fresh.items():
            spread = _deviation(rewards[ordinal])
            self._kept[ordinal] = _Kept(samples=tuple(samples), step=step, spread=spread)
        for ordinal, each in list(self._kept.items()):
            if step + 1 - each.step > self._config.max_age:
                self._let_go(ordinal)
        for ordinal in sorted(self._kept, key=self._rank)[self._config.capacity :]:
            self._let_go(ordinal)

    @property
    def uses(self) -> dict[int, int]:
        """Number of groups by how often they were trained on, over all that were ever kept."""
        return dict(sorted((self._gone + Counter(e.uses for e in self._kept.values())).items()))

    def check(self, step: int) -> list[str]:
        """Return the violations of the invariants before ``step``."""
        config, found = self._config, []
        if len(self._kept) > config.capacity:
            found.append(f"{len(self._kept)} groups are kept, at most {config.capacity} may be")
        for ordinal, each in self._kept.items():
            if not 0 < step - each.step <= config.max_age:
                found.append(f"ordinal {ordinal} of step {each.step} is kept for step {step}")
        return found

    def state_dict(self) -> dict[str, Json]:
        """Return everything as JSON values."""
        return {
            "kept": [
                {
                    "ordinal": ordinal,
                    "samples": [msgspec.json.encode(sample).decode() for sample in each.samples],
                    "step": each.step,
                    "spread": each.spread,
                    "uses": each.uses,
                }
                for ordinal, each in self._kept.items()
            ],
            "gone": {str(uses): count for uses, count in self._gone.items()},
        }

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Replace everything by what ``state_dict`` returned."""
        self._gone = Counter({int(uses): count for uses, count in state["gone"].items()})
        self._kept = {
            each["ordinal"]: _Kept(
                samples=tuple(msgspec.json.decode(s, type=Trajectory) for s in each["samples"]),
                step=each["step"],
                spread=each["spread"],
                uses=each["uses"],
            )
            for each in state["kept"]
        }

    def _let_go(self, ordinal: int) -> None:
        self._gone[self._kept.pop(ordinal).uses] += 1

    def _rank(self, ordinal: int) -> tuple[float, int, int]:
        each = self._kept[ordinal]
        if self._config.policy == "recent":
            return -each.step, each.uses, ordinal
        return -each.spread / each.uses, -each.step, ordinal


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation; sums are rounded once, so their order does not matter."""
    if not values:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((each - mean) ** 2 for each in values) / len(values))
