"""The always-on checker of the promises that every step makes, before the step is trained. Pure.

It gets one small value (`ObservedStep`): the rows about to be trained, the states of all open
ordinals, and the weights that the consumers have. It trusts no other bookkeeping: it counts itself
what was trained. That count and the violations are part of the tracked state, so it continues
across restores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from holdfast.adapters.rl.ledger.borrowed_rules import BorrowedRow, BorrowedRules, borrowed_row
from holdfast.adapters.rl.ledger.counters import spoken
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.states import OrdinalState
from holdfast.adapters.rl.samples.borrowed import Borrowed, GroupOrigin
from holdfast.adapters.rl.samples.trajectory import SampleId, Stamp, Trajectory
from holdfast.ckpt.types import Json

_TOLD = 100
"""Number of violations whose text is kept; all are counted."""


class CheckConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the checker, which is always on.

    Every ``recompute_every`` steps (0: never) the log-probabilities of one row, a different one
    each time, are recomputed under the very versions that sampled it; they may differ by
    ``tolerance``. With ``fatal`` a violation ends the job.
    """

    recompute_every: int = 0
    tolerance: float = 1e-5
    fatal: bool = False

    def __post_init__(self) -> None:
        if self.recompute_every < 0:
            raise ValueError(f"recompute_every is {self.recompute_every}, needed: 0 or more")
        if self.tolerance <= 0:
            raise ValueError(f"tolerance is {self.tolerance}, needed: above 0")


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sample about to be trained: its counts of tokens and log-probabilities, its versions.

    ``spoken`` are its tokens by the policy that spoke them.
    """

    ordinal: int
    sample: int
    tokens: int
    logprobs: int
    stamps: tuple[Stamp, ...]
    spoken: tuple[int, ...] = ()


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that one consumer samples with: ``version``, pulled in ``generation``."""

    name: str
    generation: int
    version: int


class ObservedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step about to be trained.

    ``group`` is how many samples an ordinal needs, ``eta`` the largest staleness. ``cuts`` maps a
    generation to the step it was restored to. ``dropped`` are the step's ordinals that train
    without samples. ``admitted`` is how many ordinals were ever admitted; ``states`` has the open
    ones, including this step's. ``in_order``: step t trains the next ordinals, each once.
    ``reused`` are ordinals that are trained again on purpose; they may be staler by ``reuse_age``
    steps, and their rows come last. ``pinned``: a consumer may go back to an older version, for
    work that another one lost. ``borrowed`` are the rows of other runs, ``recorded`` the origins
    that the state before the step names, and ``island`` is the name that this run shares under.
    ``books`` are the trained tokens of each policy before the step, by the ledger; empty: not told.
    ``skips``: groups whose rewards are all equal are passed over; ``skipped`` are those of the
    step, and ``rewards`` the recorded ones of these and of the ordinals that are trained.
    """

    step: int
    rows: tuple[SampleRow, ...]
    group: int
    eta: int
    admitted: int
    states: Mapping[int, str]
    cuts: Mapping[int, int]
    consumers: tuple[Consumer, ...] = ()
    dropped: frozenset[int] = frozenset()
    reused: frozenset[int] = frozenset()
    reuse_age: int = 0
    in_order: bool = True
    pinned: bool = True
    island: str = ""
    borrowed: tuple[BorrowedRow, ...] = ()
    recorded: frozenset[GroupOrigin] = frozenset()
    books: tuple[int, ...] = ()
    skips: bool = False
    skipped: frozenset[int] = frozenset()
    rewards: Mapping[int, tuple[float, ...]] = {}


class StepChecker:
    """Checks every step; ``violations`` has the findings as text, ``count`` their number."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.count = 0
        self._below = 0
        self._beyond: set[int] = set()
        self._consumers: dict[str, tuple[int, int]] = {}
        self._borrowed = BorrowedRules()
        self._spoken: list[int] | None = None

    def check(self, seen: ObservedStep) -> list[str]:
        """Return the violations of a step as text, and count its ordinals as trained."""
        ordinals = {row.ordinal for row in seen.rows} | seen.dropped | seen.skipped
        found = [
            *_rows(seen),
            *_groups(seen),
            *_skipped(seen),
            *self._trained(seen, ordinals),
            *self._elsewhere(seen, ordinals),
            *self._progress(seen),
            *self._books(seen),
            *self._borrowed.check(
                seen.step,
                seen.borrowed,
                group=seen.group,
                island=seen.island,
                recorded=seen.recorded,
            ),
        ]
        self._beyond |= ordinals - seen.reused
        while self._below in self._beyond:
            self._beyond.remove(self._below)
            self._below += 1
        return self._keep(found)

    def recomputed(self, key: SampleId, difference: float, *, tolerance: float) -> list[str]:
        """Return a violation if recomputed log-probabilities differ by more than ``tolerance``."""
        if difference <= tolerance:
            return []
        return self._keep(
            [
                f"sample {key}: its log-probabilities, computed anew by the versions that sampled "
                f"it, differ by {difference:.3g}, more than {tolerance:.3g}"
            ]
        )

    def state_dict(self) -> dict[str, Json]:
        """Return the trained ordinals, the origins of borrowed groups, and the violations."""
        return {
            "below": self._below,
            "beyond": sorted(self._beyond),
            "violations": list(self.violations),
            "count": self.count,
            "borrowed": self._borrowed.state_dict(),
            "spoken": None if self._spoken is None else [*self._spoken],
        }

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Replace all by what ``state_dict`` returned."""
        self._below, self._beyond = state["below"], set(state["beyond"])
        self.violations, self.count = list(state["violations"]), state["count"]
        self._borrowed.load_state_dict(state.get("borrowed", ()))
        self._spoken = state.get("spoken")

    # -- inside ----------------------------------------------------------------------------------

    def _keep(self, found: list[str]) -> list[str]:
        self.count += len(found)
        self.violations += found[: max(0, _TOLD - len(self.violations))]
        return found

    def _is_trained(self, ordinal: int) -> bool:
        return ordinal < self._below or ordinal in self._beyond

    def _trained(self, seen: ObservedStep, ordinals: set[int]) -> Iterator[str]:
        """Check that every ordinal is trained once, and in order unless steps train by arrival."""
        again = sorted(o for o in ordinals - seen.reused if self._is_trained(o))
        if again:
            yield f"step {seen.step} trains ordinals {again} again"
        new = sorted(o for o in seen.reused if not self._is_trained(o))
        if new:
            yield f"step {seen.step} reuses ordinals {new}, which were never trained"
        fresh = sorted(ordinals - seen.reused)
        if seen.in_order and fresh != list(range(self._below, self._below + len(fresh))):
            yield f"step {seen.step} trains ordinals {fresh}, next in order is {self._below}"
        rows = [row.ordinal for row in seen.rows if row.ordinal not in seen.reused]
        if seen.in_order and rows != sorted(rows):
            yield f"step {seen.step} has its ordinals out of order"

    def _elsewhere(self, seen: ObservedStep, ordinals: set[int]) -> Iterator[str]:
        """Check that every admitted ordinal is either open or trained, never both."""
        open_ = set(seen.states)
        both = sorted(o for o in open_ - ordinals if self._is_trained(o))
        if both:
            yield f"step {seen.step}: ordinals {both} are trained and {seen.states[both[0]]}"
        known = set(OrdinalState) - {OrdinalState.TRAINED, OrdinalState.BORROWED}
        if unexpected := sorted(o for o, state in seen.states.items() if state not in known):
            yield f"step {seen.step}: open ordinals {unexpected} are {seen.states[unexpected[0]]}"
        missing = [
            ordinal
            for ordinal in range(self._below, seen.admitted)
            if ordinal not in open_ and not self._is_trained(ordinal)
        ]
        if missing:
            yield f"step {seen.step}: ordinals {missing} are in no state"
        if beyond := sorted(o for o in open_ | ordinals if o >= seen.admitted):
            yield f"step {seen.step}: ordinals {beyond} were never admitted"

    def _progress(self, seen: ObservedStep) -> Iterator[str]:
        """Check that no consumer goes back within a generation, except to finish older work."""
        for consumer in seen.consumers:
            now = (consumer.generation, consumer.version)
            before = self._consumers.get(consumer.name, now)
            if before[0] == now[0] and now < before and not seen.pinned:
                yield (
                    f"step {seen.step}: {consumer.name} went from version {before[1]} back to "
                    f"{now[1]} in generation {now[0]}"
                )
            if _rolled_back(now, seen.cuts):
                yield f"step {seen.step}: {consumer.name} samples with rolled-back {_named(now)}"
        self._consumers = {each.name: (each.generation, each.version) for each in seen.consumers}

    def _books(self, seen: ObservedStep) -> Iterator[str]:
        """Check the ledger's book of each policy, and count the tokens of this step."""
        if not seen.books:
            return
        counted = self._spoken or list(seen.books)
        for policy, (found, wanted) in enumerate(zip(seen.books, counted, strict=False)):
            if found != wanted:
                yield (
                    f"step {seen.step}: the book of policy {policy} has {found} trained tokens, "
                    f"and {wanted} were trained"
                )
        for row in seen.rows:
            if row.ordinal in seen.reused:
                continue
            if len(row.spoken) > len(counted):
                yield f"step {seen.step}: sample {(row.ordinal, row.sample)} has an unknown speaker"
            for policy, tokens in enumerate(row.spoken[: len(counted)]):
                counted[policy] += tokens
        self._spoken = counted


def observe(
    ledger: Ledger,
    step: int,
    batch: Sequence[Trajectory],
    *,
    consumers: Iterable[Consumer] = (),
    island: str = "",
) -> ObservedStep:
    """Return the observation of ``step``, before the ledger counts it as trained.

    ``island`` is the name that this run shares samples under, empty if it does not.
    """
    plan, states = ledger.plan, ledger.states()
    taken, again = ledger.takes()
    rewards = ledger.rewards() if plan.skips else {}
    return ObservedStep(
        step=step,
        rows=tuple(row_of(each) for each in batch if not isinstance(each, Borrowed)),
        group=plan.group,
        eta=plan.eta,
        admitted=ledger.admitted,
        states={ordinal: state.value for ordinal, state in states.items()},
        cuts=ledger.cuts,
        consumers=tuple(consumers),
        dropped=frozenset(o for o in taken if states.get(o) is OrdinalState.DROPPED),
        reused=frozenset(again),
        reuse_age=plan.replay.max_age,
        in_order=not plan.by_arrival,
        pinned=plan.pinned,
        island=island,
        borrowed=tuple(borrowed_row(each) for each in batch if isinstance(each, Borrowed)),
        recorded=ledger.borrowing.recorded(step),
        books=ledger.books.tokens,
        skips=plan.skips,
        skipped=frozenset(o for o in taken if states.get(o) is OrdinalState.SKIPPED),
        rewards={ordinal: rewards[ordinal] for ordinal in taken if ordinal in rewards},
    )


def row_of(trajectory: Trajectory) -> SampleRow:
    """Return the part of a sample that the checker looks at."""
    return SampleRow(
        ordinal=trajectory.ordinal,
        sample=trajectory.sample,
        tokens=sum(end - start for start, end in trajectory.spans),
        logprobs=len(trajectory.logprobs),
        stamps=trajectory.stamps,
        spoken=spoken(trajectory),
    )


def _rows(seen: ObservedStep) -> Iterator[str]:
    """Check that every token has a log-probability and a valid, recent enough version."""
    for row in seen.rows:
        of = f"step {seen.step}, sample {(row.ordinal, row.sample)}:"
        stamped = sum(stamp.count for stamp in row.stamps)
        if not row.tokens or not row.tokens == row.logprobs == stamped:
            yield f"{of} {row.tokens} tokens, {row.logprobs} log-probabilities, {stamped} versions"
        versions = [(stamp.generation, stamp.version) for stamp in row.stamps]
        most = seen.eta + (seen.reuse_age if row.ordinal in seen.reused else 0)
        oldest = min((version for _, version in versions), default=seen.step)
        if seen.step - oldest > most:
            yield f"{of} sampled by version {oldest}, staler than {most}"
        if versions and max(version for _, version in versions) > seen.step:
            yield f"{of} sampled by a version that is not there before step {seen.step}"
        for version in versions:
            if _rolled_back(version, seen.cuts):
                yield f"{of} sampled by rolled-back {_named(version)}"


def _groups(seen: ObservedStep) -> Iterator[str]:
    """Check that every ordinal has its whole group, and each sample once."""
    wanted = set(range(seen.group))
    samples: dict[int, Counter[int]] = {}
    for row in seen.rows:
        samples.setdefault(row.ordinal, Counter())[row.sample] += 1
    for ordinal, counted in samples.items():
        if set(counted) != wanted or max(counted.values()) > 1:
            yield f"step {seen.step}: ordinal {ordinal} has samples {sorted(counted.elements())}"
        if ordinal in seen.dropped:
            yield f"step {seen.step}: dropped ordinal {ordinal} is trained"


def _skipped(seen: ObservedStep) -> Iterator[str]:
    """Check that exactly those groups are passed over whose rewards are all equal."""
    trained = {row.ordinal for row in seen.rows} - seen.reused
    for ordinal in sorted(seen.skipped):
        rewards = seen.rewards.get(ordinal, ())
        if ordinal in trained:
            yield f"step {seen.step}: skipped ordinal {ordinal} is trained"
        if len(rewards) != seen.group or len(set(rewards)) != 1:
            yield f"step {seen.step} skips ordinal {ordinal}, whose rewards are {list(rewards)}"
    for ordinal in sorted(trained) if seen.skips else ():
        rewards = seen.rewards.get(ordinal, ())
        if len(rewards) != seen.group or len(set(rewards)) == 1:
            yield f"step {seen.step} trains ordinal {ordinal}, whose rewards are {list(rewards)}"


def _rolled_back(version: tuple[int, int], cuts: Mapping[int, int]) -> bool:
    generation, number = version
    return any(later > generation and number > restored for later, restored in cuts.items())


def _named(version: tuple[int, int]) -> str:
    return f"version {version[1]} of generation {version[0]}"
