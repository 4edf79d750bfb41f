"""The first difference between a run and the reference, as a value. Pure.

Runs are compared by step, phase, round and microbatch, whatever rank did the work. With ``exact``
every bit must be equal. Without, inputs and draws must be, losses and state within a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from holdfast.elastic.loop.trace.records import (
    LeafDigest,
    LoopEntered,
    LoopLeft,
    MicrobatchSeen,
    StateSeen,
    Traced,
)
from holdfast.tools.check.traces import RankTrace

LOSS_TOLERANCE: Final = 1e-2
STATE_TOLERANCE: Final = 3e-3

What: TypeAlias = Literal[
    "state before",
    "input",
    "draws",
    "loss",
    "gradient",
    "updates",
    "state",
    "left",
    "carried",
    "own state",
]

_MOMENTS: Final[dict[str, int]] = {"state before": 0, "state": 3, "updates": 3, "left": 4}
_ORDER: Final = ("state before", "input", "draws", "loss", "gradient", "state", "updates", "left")

Value: TypeAlias = str | LeafDigest | dict[str, LeafDigest] | dict[str, str] | int | float


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class TraceMoment:
    """A moment of the training: a step, and the part of it. ``stage`` counts the script's loops."""

    stage: int
    step: int
    part: int = 1
    phase: int = 0
    round: int = 0
    microbatch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is otherwise than in the reference. ``here`` and ``there`` are short texts.

    ``names`` are the tensors or values that differ. ``restored``: the rank had just been restored.
    """

    moment: TraceMoment
    what: What
    names: tuple[str, ...] = ()
    here: str = ""
    there: str = ""
    rank: int = 0
    restored: bool = False
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    moment: TraceMoment
    what: What
    value: Value
    entered: LoopEntered
    line: str = ""
    number: float | None = None


_Key: TypeAlias = tuple[TraceMoment, What, int]


@dataclass(slots=True)
class Reference:
    """The results of the runs so far; each is the one of the first run that had it.

    ``by_world``: the result may depend on the number of ranks, so that only runs of the same number
    are compared, and each up to the first generation with another one.
    """

    exact: bool
    by_world: bool = False
    stages: list[str] = field(default_factory=list)
    _known: dict[_Key, Value] = field(default_factory=dict)
    _numbers: dict[_Key, float | None] = field(default_factory=dict)

    def add(self, traces: Sequence[RankTrace]) -> None:
        """Learn what this run shows first."""
        for seen in self._seen(traces):
            key = self._key(seen)
            known = self._known.setdefault(key, seen.value)
            self._numbers.setdefault(key, seen.number)
            if isinstance(known, dict) and isinstance(seen.value, dict):
                for name, value in seen.value.items():
                    known.setdefault(name, value)  # type: ignore[arg-type]

    def difference(self, traces: Sequence[RankTrace]) -> Difference | None:
        """Return the first difference of another run from these, None if there is none."""
        found = [d for seen in self._seen(traces) if (d := self._differs(seen)) is not None]
        return min(found, key=_when, default=None)

    def _stage(self, name: str) -> int:
        if name not in self.stages:
            self.stages.append(name)
        return self.stages.index(name)

    def _key(self, seen: _Seen) -> _Key:
        return seen.moment, seen.what, seen.entered.world if self.by_world else 0

    def _seen(self, traces: Sequence[RankTrace]) -> Iterator[_Seen]:
        worlds: dict[str, int] = {}
        for trace in traces:
            entered = trace.entered
            stage = self._stage(entered.stage)
            if self.by_world and trace.of(MicrobatchSeen):
                if worlds.setdefault(entered.stage, entered.world) != entered.world:
                    worlds[entered.stage] = 0
                if not worlds[entered.stage]:
                    continue
            for record in _settled(trace):
                match record:
                    case StateSeen(step=step, after=after):
                        what: What = "state" if after else "state before"
                        moment = TraceMoment(stage=stage, step=step, part=_MOMENTS[what])
                        leaves = _leaves(record, entered)
                        yield _Seen(moment=moment, what=what, value=leaves, entered=entered)
                        if after:
                            moment = TraceMoment(stage=stage, step=step, part=_MOMENTS["updates"])
                            count = record.updates
                            yield _Seen(moment=moment, what="updates", value=count, entered=entered)
                    case MicrobatchSeen():
                        yield from self._of_microbatch(record, stage, entered)
                    case LoopLeft(step=step) if trace is _last(traces, entered.stage):
                        moment = TraceMoment(stage=stage, step=0, part=_MOMENTS["left"])
                        yield _Seen(moment=moment, what="left", value=step, entered=entered)
                    case _:
                        pass

    def _of_microbatch(
        self, record: MicrobatchSeen, stage: int, entered: LoopEntered
    ) -> Iterator[_Seen]:
        moment = TraceMoment(
            stage=stage,
            step=record.step,
            phase=record.phase,
            round=record.round,
            microbatch=record.microbatch,
        )
        parts: list[tuple[What, Value, float | None]] = [
            ("input", record.input, None),
            ("draws", dict(record.draws), None),
            ("loss", record.loss, record.value),
            ("gradient", dict(record.gradients), None),
        ]
        for what, value, number in parts:
            yield _Seen(
                moment=moment,
                what=what,
                value=value,
                entered=entered,
                line=record.line,
                number=number,
            )

    def _differs(self, seen: _Seen) -> Difference | None:
        key = self._key(seen)
        known, names = self._known.get(key), tuple[str, ...]()
        if known is None:
            return None
        if isinstance(known, dict) and isinstance(seen.value, dict):
            names = self._names(seen, known, seen.value)
            if not names:
                return None
            here, there = _short(seen.value[names[0]]), _short(known[names[0]])
        elif known == seen.value or self._tolerates(seen):
            return None
        else:
            here, there = _text(seen.value, seen.number), _text(known, self._numbers[key])
        completed, moment = seen.entered.completed, seen.moment
        if seen.what == "left":
            moment = replace(moment, step=min(int(here), int(there)))
        begun_again = completed > 0 or seen.entered.generation > 1
        return Difference(
            moment=moment,
            what=seen.what,
            names=names,
            here=here,
            there=there,
            rank=seen.entered.rank,
            restored=seen.moment.step == completed and begun_again,
            line=seen.line,
        )

    def _tolerates(self, seen: _Seen) -> bool:
        """True if another number is no difference without exact."""
        if self.exact or seen.what not in ("loss", "updates"):
            return False
        known = self._numbers[self._key(seen)]
        return seen.what == "updates" or _close(seen.number, known)

    def _names(self, seen: _Seen, known: dict[str, Any], found: dict[str, Any]) -> tuple[str, ...]:
        if seen.what == "gradient" and not self.exact:
            return ()
        common = [name for name in found if name in known]
        if seen.what == "draws":
            return tuple(name for name in common if found[name] != known[name])
        if seen.what == "gradient" or self.exact:
            unequal = [n for n in common if _bits(found[n]) != _bits(known[n])]
            return tuple(sorted(unequal, key=lambda n: _telling(n, found[n])))
        return _beyond_tolerance(known, found, common)


def _settled(trace: RankTrace) -> Iterator[Traced]:
    """Yield the records; of a microbatch that was computed again in its pass, the last one."""
    newest = {_key(r): r for r in trace.of(MicrobatchSeen)}
    for record in trace.records:
        if not isinstance(record, MicrobatchSeen) or newest[_key(record)] is record:
            yield record


def _key(record: MicrobatchSeen) -> tuple[int, int, int, int]:
    return record.step, record.phase, record.round, record.microbatch


def _when(difference: Difference) -> tuple[TraceMoment, int]:
    return difference.moment, _ORDER.index(difference.what)


def _leaves(record: StateSeen, entered: LoopEntered) -> dict[str, LeafDigest]:
    """Return the leaves of a state, without those that each rank has for itself.

    A rank's part of a sharded tensor has a name of its own.
    """
    part = f" (rank {entered.rank} of {entered.world})"
    return {
        name + part if leaf.kind == "shard" else name: leaf
        for name, leaf in record.leaves.items()
        if leaf.kind != "own"
    }


def _last(traces: Iterable[RankTrace], stage: str) -> RankTrace:
    """Return the rank that counts as the one that left the loop: the first of the newest."""
    found = [t for t in traces if t.entered.stage == stage and t.of(LoopLeft)]
    return max(found, key=lambda t: (t.entered.generation, -t.entered.rank))


def _text(value: Value, number: float | None) -> str:
    """Return a loss as its number, a count as it is, a digest not at all."""
    if number is not None:
        return f"{number:.6g}"
    return str(value) if isinstance(value, int) else ""


def _bits(value: str | LeafDigest) -> str:
    return value.digest if isinstance(value, LeafDigest) else value


def _short(value: str | LeafDigest) -> str:
    return value.shown if isinstance(value, LeafDigest) else ""


def _telling(name: str, value: str | LeafDigest) -> tuple[bool, bool]:
    """Sort values that people can read before tensors, and parameters before optimizer state."""
    return not _short(value), ".state." in name


def _close(here: float | None, there: float | None) -> bool:
    if here is None or there is None:
        return here is there
    both_nan = math.isnan(here) and math.isnan(there)
    return both_nan or math.isclose(here, there, rel_tol=LOSS_TOLERANCE, abs_tol=LOSS_TOLERANCE)


def _beyond_tolerance(
    known: dict[str, LeafDigest], found: dict[str, LeafDigest], common: Sequence[str]
) -> tuple[str, ...]:
    """Return the names that differ too much: plain values one by one, tensors by their object.

    Buffers follow the rank that ran the microbatch, so they may differ.
    """
    wrong: list[str] = []
    distances: dict[str, dict[str, float]] = {}
    norms: dict[str, float] = {}
    for name in common:
        here, there = found[name], known[name]
        if here.kind == "value":
            if here.digest != there.digest and not _close_text(here.shown, there.shown):
                wrong.append(name)
        elif here.kind == "parameter":
            group = name.partition(".")[0]
            distance = math.hypot(here.norm - there.norm, here.mark - there.mark)
            distances.setdefault(group, {})[name] = distance
            norms[group] = math.hypot(norms.get(group, 0.0), there.norm)
    for group, by_name in distances.items():
        if not math.hypot(*by_name.values()) <= STATE_TOLERANCE * norms[group]:
            wrong.append(max(by_name, key=lambda name: by_name[name]))
    return tuple(wrong)


def _close_text(here: str, there: str) -> bool:
    try:
        return math.isclose(float(here), float(there), rel_tol=LOSS_TOLERANCE)
    except ValueError:
        return False
