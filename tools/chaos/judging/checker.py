"""The checks of a job's history: nothing lost, nothing twice, nothing mixed up. Pure.

Every check looks at the part that *survived* the restarts (`record.History`), except the one that
counts undone work. A *reference* is the history of the same job undisturbed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import msgspec

from holdfast.tools.chaos.judging.record import History

_NAMED: Final = 5


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A promise that a history breaks; ``check`` is its name in `CHECKS`."""

    check: str
    message: str


class HistoryVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a history.

    ``steps`` survived; ``executed`` counts completions of steps, ``undone`` those that were rolled
    back, ``undone_most`` those that a single restart rolled back. ``checked`` names the checks for
    which there were enough reports.
    """

    attempts: int
    steps: int
    executed: int
    undone: int
    undone_most: int
    samples: int
    checked: tuple[str, ...]
    violations: tuple[Violation, ...]

    @property
    def held(self) -> bool:
        """True if nothing is wrong."""
        return not self.violations

    @property
    def names(self) -> tuple[str, ...]:
        """All checks of a history, and those of a sea if it was one."""
        return tuple(dict.fromkeys((*CHECKS, *self.checked)))


class Promises(msgspec.Struct, frozen=True, kw_only=True):
    """Promises of a job beyond those that always hold.

    ``undone_most``: number of steps that a restart may undo (None: any number); ``dense``: sample
    ids are numbers from 0 on without a gap in every epoch but the last.
    """

    undone_most: int | None = None
    dense: bool = False


_Told: TypeAlias = Iterator[str]
_Check: TypeAlias = Callable[[History, History | None, Promises], _Told]


def check(
    history: History, *, reference: History | None = None, promises: Promises | None = None
) -> HistoryVerdict:
    """Return the verdict on a history, with every violation found."""
    promises = promises or Promises()
    checked, violations = [], []
    for name, (wants, find) in _FINDERS.items():
        if wants(history, reference, promises):
            checked.append(name)
            broken = find(history, reference, promises)
            violations += [Violation(check=name, message=message) for message in broken]
    undone = [len(steps) for steps in history.undone.values()]
    return HistoryVerdict(
        attempts=len({attempt for attempt, _ in history.ranks}),
        steps=len(history.surviving),
        executed=len(history.ranks),
        undone=sum(undone),
        undone_most=max(undone, default=0),
        samples=sum(len(each.ids) for each in history.consumed if history.survives(each)),
        checked=tuple(checked),
        violations=tuple(violations),
    )


# -- steps -----------------------------------------------------------------------------------------


def _no_gap(history: History, reference: History | None, promises: Promises) -> _Told:
    """Yield gaps: steps must follow each other, and no restart may skip one."""
    steps = list(history.surviving)
    for before, after in pairwise(steps):
        if after != before + 1:
            lost = after - before - 1
            yield (
                f"step {before} of attempt {history.surviving[before]} is followed by step {after} "
                f"of attempt {history.surviving[after]}: {lost} steps were never trained"
            )


def _in_order(history: History, reference: History | None, promises: Promises) -> _Told:
    """Yield disorder: within an attempt every rank's steps must follow each other."""
    last: dict[tuple[int, int], int] = {}
    for commit in history.commits:
        key = (commit.attempt, commit.rank)
        if key in last and commit.step != last[key] + 1:
            yield (
                f"rank {commit.rank} completed step {commit.step} after step {last[key]} in "
                f"attempt {commit.attempt}"
            )
        last[key] = commit.step


def _one_at_a_time(history: History, reference: History | None, promises: Promises) -> _Told:
    """Yield overlaps: no rank may complete a step after a later attempt has completed one."""
    newest, since = -1, 0.0
    for commit in history.commits:
        if commit.attempt > newest:
            newest, since = commit.attempt, commit.t
        elif commit.attempt < newest:
            yield (
                f"rank {commit.rank} completed step {commit.step} in attempt {commit.attempt}, "
                f"{commit.t - since:.3f} s after attempt {newest} had completed its first"
            )


def _bounded(history: History, reference: History | None, promises: Promises) -> _Told:
    """Yield restarts that undid more steps than promised."""
    most = promises.undone_most
    for attempt, steps in history.undone.items():
        if most is not None and len(steps) > most:
            yield (
                f"{len(steps)} steps of attempt {attempt} were undone, {steps[0]} to {steps[-1]}; "
                f"{most} may be"
            )


def _as_many(history: History, reference: History | None, promises: Promises) -> _Told:
    """Yield missing steps: the job must make all steps of the reference."""
    if reference is not None and (missing := reference.surviving.keys() - history.surviving.keys()):
        yield f"{len(missing)} steps of the reference were not completed: {_some(sorted(missing))}"


# -- samples ---------------------------------------------------------------------------------------


def _once(history: History, reference: History | None, promises: Promises) -> _Told:
    """Yield repeats: no sample may be trained on twice in an epoch."""
    where: dict[tuple[int, int | str], list[int]] = defaultdict(list)
    for each in history.consumed:
        if history.survives(each):
            for name in each.ids:
                where[each.epoch, name].append(each.step)
    twice = {key: steps for key, steps in where.items() if len(steps) > 1}
    if twice:
        (epoch, name), steps = next(iter(twice.items()))
        yield (
            f"{len(twice)} samples were trained on more than once; the first is {name} of epoch "
            f"{epoch}, in steps {_some(sorted(steps))}"
        )


def _none_missed(history: History, reference: History | None, promises: Promises) -> _Told:
    """Yield gaps: all samples before the last one of their epoch must be trained on."""
    epochs: dict[int, set[int]] = defaultdict(set)
    for each in history.consumed:
        if history.survives(each):
            epochs[each.epoch] |= {name for name in each.ids if isinstance(name, int)}
    for epoch, names in sorted(epochs.items()):
        if missing := sorted(set(range(max(names, default=-1) + 1)) - names):
            yield f"{len(missing)} samples of epoch {epoch} were skipped: {_some(missing)}"


def _same_samples(history: History, reference: History | None, promises: Promises) -> _Told:
    """Yield steps that trained on other samples than those of the reference."""
    assert reference is not None
    ours, theirs = _by_step(history), _by_step(reference)
    wrong = [s for s in history.surviving if s in theirs and ours.get(s) != theirs[s]]
    if wrong:
        own, its = ours.get(wrong[0], Counter()), theirs[wrong[0]]
        more, less = list(own - its), list(its - own)
        yield (
            f"{len(wrong)} steps trained on other samples than the reference: {_some(wrong)}; step "
            f"{wrong[0]} has {len(more)} others and lacks {len(less)}"
        )


def _all_ranks(history: History, reference: History | None, promises: Promises) -> _Told:
    """Yield ranks that reported no samples for a surviving step for which others did."""
    reporting: dict[int, set[int]] = defaultdict(set)
    for each in history.consumed:
        if history.survives(each):
            reporting[each.step].add(each.rank)
    for step, attempt in history.surviving.items():
        if step in reporting and (silent := history.ranks[attempt, step] - reporting[step]):
            yield f"ranks {_some(sorted(silent))} completed step {step} and reported no samples"


def _by_step(history: History) -> dict[int, Counter[tuple[int, int | str]]]:
    found: dict[int, Counter[tuple[int, int | str]]] = defaultdict(Counter)
    for each in history.consumed:
        if history.survives(each):
            found[each.step].update((each.epoch, name) for name in each.ids)
    return found


# -- state -----------------------------------------------------------------------------------------


def _same_state(history: History, reference: History | None, promises: Promises) -> _Told:
    """Yield the first step whose state differs from the reference, bit for bit, rank by rank."""
    assert reference is not None
    known = {(s.step, s.rank): s.digest for s in reference.states if reference.survives(s)}
    for each in sorted(history.states, key=lambda each: each.step):
        wanted = known.get((each.step, each.rank), each.digest)
        if history.survives(each) and wanted != each.digest:
            yield (
                f"after step {each.step} the state of rank {each.rank} is {each.digest}, and the "
                f"reference has {wanted}; this is the first difference"
            )
            return


def _repeatable(history: History, reference: History | None, promises: Promises) -> _Told:
    """Yield the first step that came to another state when it was executed again."""
    seen: dict[tuple[int, int], str] = {}
    for each in history.states:
        before = seen.setdefault((each.step, each.rank), each.digest)
        if before != each.digest:
            yield (
                f"step {each.step} of rank {each.rank} has state {each.digest} in attempt "
                f"{each.attempt} and had {before} in an earlier attempt"
            )
            return


# -- the checks ------------------------------------------------------------------------------------

_Wants: TypeAlias = Callable[[History, History | None, Promises], bool]

_FINDERS: Final[dict[str, tuple[_Wants, _Check]]] = {
    "no step skipped": (lambda h, r, p: True, _no_gap),
    "steps in order": (lambda h, r, p: True, _in_order),
    "one attempt at a time": (lambda h, r, p: True, _one_at_a_time),
    "bounded loss": (lambda h, r, p: p.undone_most is not None, _bounded),
    "all steps": (lambda h, r, p: r is not None, _as_many),
    "samples once": (lambda h, r, p: bool(h.consumed), _once),
    "no sample skipped": (lambda h, r, p: p.dense and bool(h.consumed), _none_missed),
    "samples of all ranks": (lambda h, r, p: bool(h.consumed), _all_ranks),
    "samples of the reference": (
        lambda h, r, p: r is not None and bool(h.consumed and r.consumed),
        _same_samples,
    ),
    "state of the reference": (
        lambda h, r, p: r is not None and bool(h.states and r.states),
        _same_state,
    ),
    "steps repeat exactly": (lambda h, r, p: bool(h.states), _repeatable),
}

CHECKS: Final = tuple(_FINDERS)
"""The names of all checks."""


def _some(values: Sequence[object]) -> str:
    shown = ", ".join(str(value) for value in values[:_NAMED])
    return shown if len(values) <= _NAMED else f"{shown} and {len(values) - _NAMED} more"
