"""The rollout engine: continuous batching over a fixed number of slots.

Each tick feeds one token per occupied slot, prompt and answer alike, at one shape. A partial
trajectory is fed again from its prompt and goes on where it stopped, with the same tokens and
bitwise the same log-probabilities it would have had without the interruption. Weights that change
under way have everything fed again too, so that a token's log-probability is always that of one
policy version, given all the tokens before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adapters.rl.policy import Policy, fill
from adapters.rl.sampling import choose, uniform
from adapters.rl.trajectory import (
    Delta,
    Limits,
    SampleId,
    Stamp,
    Trajectory,
    cut_stamps,
    extend_stamps,
)


@dataclass(slots=True)
class _Slot:
    start: Trajectory
    tokens: list[int]
    logprobs: list[float]
    stamps: tuple[Stamp, ...]
    fed: int = 0
    logged: int = 0

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
        )


@dataclass(slots=True)
class Engine:
    """Samples answers with the weights of one policy version at a time.

    ``pinned``: it changes weights only when nothing is at work.
    """

    policy: Policy
    limits: Limits
    slots: int
    seed: int
    pinned: bool = True
    generation: int = 0
    version: int | None = None
    _cache: Any = field(init=False)
    _slots: list[_Slot | None] = field(init=False)
    _deltas: list[Delta] = field(init=False)

    def __post_init__(self) -> None:
        self.policy.eval()
        self._cache = self.policy.new_cache(self.slots)
        self._slots = [None] * self.slots
        self._deltas = []

    @property
    def free(self) -> int:
        """Number of empty slots."""
        return sum(slot is None for slot in self._slots)

    @property
    def idle(self) -> bool:
        """Whether every slot is empty."""
        return self.free == self.slots

    def load(self, weights: Mapping[str, Tensor], *, version: int, generation: int) -> None:
        """Take the weights of a policy version; what is at work goes on under them."""
        if self.pinned and not self.idle:
            raise RuntimeError(f"version {version} offered while version {self.version} is in use")
        fill(self.policy, weights)
        self.version, self.generation = version, generation
        for slot in self._slots:
            if slot is not None:
                slot.fed = 0

    def unload(self) -> None:
        """Forget the weights and everything sampled with them that is not finished."""
        self._slots = [None] * self.slots
        self._deltas.clear()
        self.version = None

    def put(self, trajectory: Trajectory) -> None:
        """Start or continue a trajectory in an empty slot."""
        if self.version is None:
            raise RuntimeError("no weights loaded: load a policy version before putting work")
        slot = _Slot(
            start=trajectory,
            tokens=list(trajectory.tokens),
            logprobs=list(trajectory.logprobs),
            stamps=trajectory.stamps,
        )
        self._slots[self._slots.index(None)] = slot

    def running(self) -> list[Trajectory]:
        """Return the trajectories in the slots as they stand."""
        return [slot.trajectory() for slot in self._slots if slot is not None]

    def progress(self) -> dict[SampleId, int]:
        """Return how many tokens each running trajectory has."""
        return {slot.start.key: len(slot.tokens) for slot in self._slots if slot is not None}

    def oldest(self) -> dict[SampleId, int]:
        """Return the oldest version of each running trajectory's tokens, of those to come too."""
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
        """Feed one token per occupied slot; return the trajectories that ended."""
        live = [(row, slot) for row, slot in enumerate(self._slots) if slot is not None]
        if not live:
            return []
        tokens = np.zeros(self.slots, np.int64)
        positions = np.zeros(self.slots, np.int64)
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

    def take_deltas(self) -> list[Delta]:
        """Return, once, every token sampled since the last call, for the worker's log."""
        for slot in self._slots:
            if slot is not None:
                self._note(slot)
        deltas, self._deltas = self._deltas, []
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
            if self.limits.over(len(slot.start.prompt), len(slot.tokens), slot.tokens[-1]):
                self._note(slot)
                ended.append(slot.trajectory())
                self._slots[row] = None
        return ended

    def _note(self, slot: _Slot) -> None:
        if slot.logged == len(slot.tokens):
            return
        start, total = slot.logged, len(slot.tokens)
        before = cut_stamps(slot.stamps, start)
        self._deltas.append(
            Delta(
                ordinal=slot.start.ordinal,
                sample=slot.start.sample,
                start=start,
                tokens=tuple(slot.tokens[start:]),
                logprobs=tuple(slot.logprobs[start:]),
                stamps=_skip(slot.stamps, before),
            )
        )
        slot.logged = total


def _skip(stamps: tuple[Stamp, ...], before: tuple[Stamp, ...]) -> tuple[Stamp, ...]:
    """Return what follows the prefix ``before`` of ``stamps``."""
    if not before:
        return stamps
    last = len(before) - 1
    rest = stamps[last].count - before[last].count
    first = Stamp(generation=stamps[last].generation, version=stamps[last].version, count=rest)
    return extend_stamps((), (first, *stamps[last + 1 :]))
