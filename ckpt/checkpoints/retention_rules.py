"""Rules for the checkpoints to keep and to remove, with the reason for each. Pure.

A step stays when any rule keeps it: it is among the newest, at a round number, among the best by a
metric, pinned, the newest one whose bytes can be trusted, or younger than the age limit. An age
limit also removes steps that other rules keep, except pins and the newest trusted step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from holdfast.ckpt.types import Json, learn

_BEST: Final = re.compile(r"(?P<metric>.+?):(?P<order>min|max)(?::(?P<count>\d+))?")


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the ``count`` steps whose plain value at the path ``metric`` is lowest or highest."""

    metric: str
    lowest: bool
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"keep-best keeps {self.count} steps; give at least 1")

    @classmethod
    def parse(cls, text: str) -> Best:
        """Read ``eval.loss:min`` or ``reward:max:3``. Raises ``ValueError`` for anything else."""
        match = _BEST.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not METRIC:min or METRIC:max, as in eval.loss:min")
        return cls(
            metric=match["metric"],
            lowest=match["order"] == "min",
            count=int(match["count"] or 1),
        )


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules. ``most_steps_old`` counts steps below the newest, ``most_age_s`` seconds."""

    keep_last: int = 3
    keep_every: int | None = None
    keep_best: tuple[Best, ...] = ()
    most_steps_old: int | None = None
    most_age_s: float | None = None

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep-last is {self.keep_last}; at least one checkpoint must stay")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep-every is {self.keep_every}; give at least 1")
        if self.most_steps_old is not None and self.most_steps_old < 0:
            raise ValueError(f"an age limit of {self.most_steps_old} steps is negative")
        if self.most_age_s is not None and not self.most_age_s >= 0:
            raise ValueError(f"an age limit of {self.most_age_s} seconds is negative")


class PruneCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A committed step: its plain values, whether it is pinned, and its age where known."""

    step: int
    values: Mapping[str, Json] = {}
    pinned: bool = False
    age_s: float | None = None


class RetentionVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The decision on a step, with its reasons."""

    step: int
    keep: bool
    reasons: tuple[str, ...]


def judge(
    candidates: Sequence[PruneCandidate], rules: Rules, *, newest_verified: int
) -> tuple[RetentionVerdict, ...]:
    """Return a verdict on every step, oldest first; ``newest_verified`` stays in any case."""
    there = sorted(candidates, key=lambda candidate: candidate.step)
    kept: dict[int, list[str]] = {candidate.step: [] for candidate in there}
    for candidate in there[-rules.keep_last :]:
        kept[candidate.step].append(f"among the newest {rules.keep_last}")
    for candidate in there:
        if rules.keep_every and candidate.step % rules.keep_every == 0:
            kept[candidate.step].append(f"a multiple of {rules.keep_every}")
    for best in rules.keep_best:
        for place, (step, value) in enumerate(ranked(there, best), start=1):
            if place <= best.count:
                kept[step].append(_place(best, place, value))
    verdicts = []
    for candidate in there:
        expired = _expired(candidate, rules, newest=there[-1].step)
        firm = ["pinned"] if candidate.pinned else []
        if candidate.step == newest_verified:
            firm.append("the newest that can be trusted")
        reasons = firm + ([] if expired else kept[candidate.step])
        ending = (expired,) if expired else ("no rule keeps it",)
        verdicts.append(
            RetentionVerdict(
                step=candidate.step, keep=bool(reasons), reasons=tuple(reasons) or ending
            )
        )
    return tuple(verdicts)


def ranked(candidates: Sequence[PruneCandidate], best: Best) -> list[tuple[int, float]]:
    """Return steps and metric, best first; of equal ones the newer first.

    Steps without the metric, or where it is not a finite number, are left out.
    """
    found = []
    for candidate in candidates:
        value = value_at(candidate.values, best.metric)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found.append((candidate.step, float(value)))
    sign = 1 if best.lowest else -1
    return sorted(found, key=lambda item: (sign * item[1], -item[0]))


def value_at(values: Mapping[str, Json], path: str) -> Json:
    """Return the plain value at a dotted path, however the path divides; None if there is none."""
    if path in values:
        return values[path]
    for at, letter in enumerate(path):
        below = _entries(values.get(path[:at])) if letter == "." else {}
        if (found := value_at(below, path[at + 1 :])) is not None:
            return found
    return None


def _entries(value: Json) -> Mapping[str, Json]:
    """Return the entries of an encoded dict of any kind (`holdfast.ckpt.state.plain`) by name."""
    match value:
        case {"$map": list(pairs)} | {"$python": ["OrderedDict", [list(pairs), _]]}:
            return {key: item for key, item in pairs if isinstance(key, str)}
        case {"$python": ["Counter", inner]} | {"$python": ["defaultdict", [_, inner]]}:
            return _entries(inner)
        case dict():
            return value
    return {}


def _place(best: Best, place: int, value: float) -> str:
    order = "lowest" if best.lowest else "highest"
    number = {1: "", 2: "2nd ", 3: "3rd "}.get(place, f"{place}th ")
    return f"{number}{order} {best.metric} ({value:g})"


def _expired(candidate: PruneCandidate, rules: Rules, *, newest: int) -> str | None:
    old = newest - candidate.step
    if rules.most_steps_old is not None and old > rules.most_steps_old:
        return f"{old} steps older than the newest, the limit is {rules.most_steps_old}"
    if rules.most_age_s is None or candidate.age_s is None or candidate.age_s <= rules.most_age_s:
        return None
    return f"seen {duration(candidate.age_s)} ago, the limit is {duration(rules.most_age_s)}"


_YEAR_S: Final = 365.25 * 86_400
_UNITS: Final = (("w", 604_800), ("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def duration(seconds: float) -> str:
    """Return a duration in its largest unit that is not less than one."""
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.3g}{unit}"
    return f"{seconds:.3g}s"


def parse_duration(text: str) -> float:
    """Return the seconds of ``2y``, ``7d``, ``12h``, ``30m`` or ``90s``.

    Raises ``ValueError`` for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([ywdhms])", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write it as in 7d, 12h or 90s")
    return float(match[1]) * {"y": _YEAR_S, **dict(_UNITS)}[match[2]]


def parse_limit(text: str) -> tuple[float | None, int | None]:
    """Read an age limit: seconds from ``7d``, ``12h``, ``30m``, or steps from ``5000steps``.

    Raises ``ValueError`` for anything else.
    """
    if match := re.fullmatch(r"(\d+)\s*steps?", text):
        return None, int(match[1])
    try:
        return parse_duration(text), None
    except ValueError:
        message = f"{text!r} is not an age limit; write it as in 7d, 12h or 5000steps"
        raise ValueError(message) from None


learn(globals())
