"""The rollout engine: continuous batching over a fixed number of slots.

Each tick feeds one token per occupied slot, prompt and answer alike, at one shape. A partial
trajectory is fed again from its prompt and continues where it stopped, with the same tokens and
bitwise the same log-probabilities as without the interruption. When weights change in the middle,
everything is fed again too, so that a token's log-probability is always that of one policy version,
given all the tokens before it. If weights may change, bits depend on the time of the change in
any case; there all tokens but the newest are fed at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.adapters.rl.policy.policy import Policy, fill
from holdfast.adapters.rl.policy.rounding import Precision, round_weights
from holdfast.adapters.rl.samples.noise import choose, uniform
from holdfast.adapters.rl.samples.trajectory import (
    Delta,
    SampleId,
    Stamp,
    Trajectory,
    Turn,
    TurnLimits,
    cut_stamps,
    extend_stamps,
    sampled_before,
)

Logged = tuple[int, int]
"""Number of tokens and number of replied turns of a trajectory that are in a log."""


@dataclass(slots=True)
class _Slot:
    start: Trajectory
    tokens: list[int]
    logprobs: list[float]
    stamps: tuple[Stamp, ...]
    fed: int = 0
    logged: Logged = (0, 0)

    @property
    def key(self) -> SampleId:
        return self.start.key

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.start.turns

    @property
    def length(self) -> int:
        return len(self.start.prompt) + len(self.tokens)

    def token(self, position: int) -> int:
        prompt = self.start.prompt
        return prompt[position] if position < len(prompt) else self.tokens[position - len(prompt)]

    def trajectory(self) -> Trajectory:
        return Trajectory(
            ordinal=self.start.ordinal,
            sample=self.start.sample,
            prompt=self.start.prompt,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            stamps=self.stamps,
            turns=self.turns,
        )


@dataclass(frozen=True, slots=True)
class _Left:
    """The cached rest in an empty slot: ``fed`` tokens of a trajectory.

    An empty slot is fed too, at position ``fed``, which is unused yet.
    """

    trajectory: Trajectory
    fed: int

    def begins(self, other: Trajectory) -> bool:
        """Say whether ``other`` continues this trajectory."""
        tokens = self.trajectory.tokens
        return self.trajectory.key == other.key and other.tokens[: len(tokens)] == tokens


@dataclass(slots=True)
class Engine:
    """Samples answers with the weights of one policy version at a time.

    ``pinned``: weights change only when no sample is in progress. With several policies, ``prefix``
    stands before the names of this one's parameters. With an environment, the engine samples up to
    the end of a turn; a trajectory that comes back with the reply before another took its slot need
    not be fed again. It samples with weights of ``precision``.
    """

    policy: Policy
    limits: TurnLimits
    slots: int
    seed: int
    pinned: bool = True
    precision: Precision = "full"
    generation: int = 0
    version: int | None = None
    prefix: str = ""
    _cache: Any = field(init=False)
    _slots: list[_Slot | None] = field(init=False)
    _left: list[_Left | None] = field(init=False)
    _deltas: list[Delta] = field(init=False)

    def __post_init__(self) -> None:
        self.policy.eval()
        self._cache = self.policy.new_cache(self.slots)
        self._slots = [None] * self.slots
        self._left = [None] * self.slots
        self._deltas = []

    @property
    def free(self) -> int:
        """Number of empty slots."""
        return sum(slot is None for slot in self._slots)

    @property
    def renewable(self) -> bool:
        """True if newer weights may be loaded while samples are in progress."""
        return not self.pinned

    @property
    def idle(self) -> bool:
        """True if every slot is empty."""
        return self.free == self.slots

    def load(self, weights: Mapping[str, Tensor], *, version: int, generation: int) -> None:
        """Load the weights of a policy version; samples in progress continue under them."""
        if self.pinned and not self.idle:
            raise RuntimeError(f"version {version} offered while version {self.version} is in use")
        fill(self.policy, weights, prefix=self.prefix)
        round_weights(self.policy, self.precision)
        self.version, self.generation = version, generation
        self._left = [None] * self.slots
        for slot in self._slots:
            if slot is not None:
                slot.fed = 0

    def unload(self) -> None:
        """Forget the weights and all unfinished samples."""
        self._slots = [None] * self.slots
        self._left = [None] * self.slots
        self._deltas.clear()
        self.version = None

    def put(self, trajectory: Trajectory, *, logged: Logged = (0, 0)) -> None:
        """Start or continue a trajectory in an empty slot; ``logged`` is the part the log has."""
        if self.version is None:
            raise RuntimeError("no weights loaded: load a policy version before putting work")
        row = self._row_for(trajectory)
        left, self._left[row] = self._left[row], None
        self._slots[row] = _Slot(
            start=trajectory,
            tokens=list(trajectory.tokens),
            logprobs=list(trajectory.logprobs),
            stamps=trajectory.stamps,
            fed=left.fed if left and left.begins(trajectory) else 0,
            logged=logged,
        )

    def _row_for(self, trajectory: Trajectory) -> int:
        """Return the empty slot that caches its beginning, else the first without a cached rest."""
        empty = [row for row, slot in enumerate(self._slots) if slot is None]
        for row in empty:
            left = self._left[row]
            if left and left.begins(trajectory):
                return row
        return next((row for row in empty if self._left[row] is None), empty[0])

    def running(self) -> list[Trajectory]:
        """Return the trajectories in the slots, as they are now."""
        return [slot.trajectory() for slot in self._slots if slot is not None]

    def progress(self) -> dict[SampleId, int]:
        """Return how many tokens of each running trajectory were sampled."""
        return {slot.start.key: len(slot.logprobs) for slot in self._slots if slot is not None}

    def oldest(self) -> dict[SampleId, int]:
        """Return the oldest version of each running trajectory's tokens, future ones included."""
        return {
            slot.start.key: min((stamp.version for stamp in slot.stamps), default=self.version or 0)
            for slot in self._slots
            if slot is not None
        }

    def drop(self, keys: set[SampleId]) -> None:
        """Empty the slots of these samples."""
        self._slots = [
            None if slot is not None and slot.start.key in keys else slot for slot in self._slots
        ]

    def tick(self) -> list[Trajectory]:
        """Feed one token per occupied slot; return the trajectories whose turn is over."""
        live = [(row, slot) for row, slot in enumerate(self._slots) if slot is not None]
        if not live:
            return []
        if not self.pinned:
            self._catch_up(live)
        tokens = np.zeros(self.slots, np.int64)
        positions = np.array([left.fed if left else 0 for left in self._left], np.int64)
        for row, slot in live:
            tokens[row], positions[row] = slot.token(slot.fed), slot.fed
            slot.fed += 1
        logits = self.policy.decode(
            torch.from_numpy(tokens), torch.from_numpy(positions), self._cache
        )
        growing = [(row, slot) for row, slot in live if slot.fed == slot.length]
        if growing:
            self._sample(growing, logits)
        return self._collect(growing)

    def log_with(self, other: Engine) -> None:
        """Queue for the log where ``other`` does, so that all deltas of a sample stay in order."""
        self._deltas = other._deltas

    def note(self, delta: Delta) -> None:
        """Queue ``delta`` for the log, behind all earlier ones."""
        self._deltas.append(delta)

    def _catch_up(self, live: Sequence[tuple[int, _Slot]]) -> None:
        """Feed at once all tokens before the newest of each trajectory."""
        behind = [(row, slot) for row, slot in live if slot.length - slot.fed > 1]
        if not behind:
            return
        tokens = np.zeros((len(behind), max(slot.length for _, slot in behind) - 1), np.int64)
        for line, (_, slot) in zip(tokens, behind, strict=True):
            line[: slot.length - 1] = (*slot.start.prompt, *slot.tokens)[:-1]
            slot.fed = slot.length - 1
        rows = torch.tensor([row for row, _ in behind])
        self.policy.prefill(torch.from_numpy(tokens), rows, self._cache)

    def take_deltas(self) -> list[Delta]:
        """Return, once, every token sampled since the last call, for the worker's log."""
        for slot in self._slots:
            if slot is not None:
                self._note(slot)
        deltas = [*self._deltas]
        self._deltas.clear()
        return deltas

    def _sample(self, growing: list[tuple[int, _Slot]], logits: Tensor) -> None:
        rows = torch.tensor([row for row, _ in growing])
        logprobs = torch.log_softmax(logits, -1)[rows].numpy()
        noise = uniform(
            self.seed,
            np.array([slot.start.ordinal for _, slot in growing]),
            np.array([slot.start.sample for _, slot in growing]),
            np.array([slot.length for _, slot in growing]),
        )
        assert self.version is not None
        stamp = Stamp(generation=self.generation, version=self.version, count=1)
        for (_, slot), row, token in zip(growing, logprobs, choose(logprobs, noise), strict=True):
            slot.tokens.append(int(token))
            slot.logprobs.append(float(row[token]))
            slot.stamps = extend_stamps(slot.stamps, [stamp])

    def _collect(self, growing: list[tuple[int, _Slot]]) -> list[Trajectory]:
        ended: list[Trajectory] = []
        for row, slot in growing:
            start = slot.start.turn_start
            before, new = len(slot.start.prompt) + start, len(slot.tokens) - start
            if self.limits.over(before, new, slot.tokens[-1]):
                self._note(slot)
                ended.append(slot.trajectory())
                self._slots[row] = None
                if self.limits.turns:
                    self._left[row] = _Left(ended[-1], slot.fed)
        return ended

    def _note(self, slot: _Slot) -> None:
        logged = (len(slot.tokens), len(slot.turns))
        if slot.logged != logged:
            self._deltas.append(unlogged(slot, slot.logged))
            slot.logged = logged


def unlogged(each: Trajectory | _Slot, logged: Logged) -> Delta:
    """Return the part of a trajectory that is not ``logged``."""
    start, turns = logged
    sampled = sampled_before(each.turns[:turns], start)
    return Delta(
        ordinal=each.key[0],
        sample=each.key[1],
        start=start,
        tokens=tuple(each.tokens[start:]),
        logprobs=tuple(each.logprobs[sampled:]),
        stamps=_skip(each.stamps, cut_stamps(each.stamps, sampled)),
        turns=each.turns[turns:],
    )


def _skip(stamps: tuple[Stamp, ...], before: tuple[Stamp, ...]) -> tuple[Stamp, ...]:
    """Return the stamps that follow the prefix ``before`` of ``stamps``."""
    if not before:
        return stamps
    last = len(before) - 1
    rest = stamps[last].count - before[last].count
    first = Stamp(generation=stamps[last].generation, version=stamps[last].version, count=rest)
    return extend_stamps((), (first, *stamps[last + 1 :]))
