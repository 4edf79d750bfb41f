"""The training of the small jobs: real samplers, shares, sums, cursor and capture; a toy model.

Gradients are small whole numbers. Independent rules can therefore compute the expected result in
any order, and it must be met bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any, Final

import numpy as np
import torch
from doubles.shards import capture_world

from holdfast.ckpt.testing.shards import Shard
from holdfast.elastic.config import Batch, Settings
from holdfast.elastic.data.sampler import Permutation, positions, sample_indices
from holdfast.elastic.gradients.exact import FLOAT32
from holdfast.elastic.planning.shares import part
from holdfast.elastic.tracked.cursor import KEY, Cursor
from holdfast.tools.chaos.judging.checker import Promises, check
from holdfast.tools.chaos.judging.record import Consumed, History, Stated, StepCommit

MICROBATCHES: Final = 8
SIZE: Final = 2
SAMPLES: Final = 97
SEED: Final = 5
_GRID: Final = 0
_WORK: Final = MICROBATCHES * SIZE

State = dict[str, Any]


def new_state(width: int) -> State:
    """Return the state before the first step: zeros, a frozen tensor, and a cursor."""
    settings = Settings(batch=Batch(microbatches=MICROBATCHES, size=SIZE), seed=SEED)
    return {"w": torch.zeros(width, 3), "frozen": _frozen(), KEY: Cursor(settings)}


def steps_of(state: State) -> int:
    """Return the number of complete steps."""
    return int(state[KEY].step)


def shards(state: State, *, ranks: int, generation: int) -> list[Shard]:
    """Return the shards that each rank writes; all ranks hold the whole state."""
    return capture_world([state] * ranks, step=steps_of(state), generation=generation)


class SmallJobHistory:
    """The history of a small job, reported in the order in which it happens."""

    def __init__(self) -> None:
        self._times = count()
        self._commits: list[StepCommit] = []
        self._consumed: list[Consumed] = []
        self._states: list[Stated] = []

    @property
    def history(self) -> History:
        """The history so far."""
        return History(
            commits=tuple(self._commits),
            consumed=tuple(self._consumed),
            states=tuple(self._states),
        )

    def samples(self, step: int, rank: int, attempt: int, *, epoch: int, ids: list[int]) -> None:
        """Report that a rank trains on samples."""
        at = next(self._times)
        reported = Consumed(
            t=at, step=step, rank=rank, attempt=attempt, epoch=epoch, ids=tuple(ids)
        )
        self._consumed.append(reported)

    def step(self, step: int, rank: int, attempt: int) -> None:
        """Report that a rank has completed a step."""
        self._commits.append(StepCommit(t=next(self._times), step=step, rank=rank, attempt=attempt))

    def state(self, step: int, rank: int, attempt: int, digest: str) -> None:
        """Report the digest of a rank's state after a step."""
        reported = Stated(t=next(self._times), step=step, rank=rank, attempt=attempt, digest=digest)
        self._states.append(reported)


def train(state: State, *, ranks: int, attempt: int, reported: SmallJobHistory) -> None:
    """Do one step on ``ranks`` ranks, one after the other, and report their samples."""
    step, whole = steps_of(state), torch.zeros_like(state["w"])
    for rank in range(ranks):
        total: torch.Tensor | None = None
        mine: dict[int, list[int]] = {}
        for microbatch in part(MICROBATCHES, rank=rank, ranks=ranks):
            wanted = positions(
                step=step, microbatch=microbatch, microbatches=MICROBATCHES, size=SIZE
            )
            ids = sample_indices(wanted, samples=SAMPLES, seed=SEED)
            for position, name in zip(wanted, ids, strict=True):
                mine.setdefault(position // SAMPLES, []).append(name)
            total = FLOAT32.added(total, _gradient(ids, len(whole)), _GRID)
        for epoch, names in mine.items():
            reported.samples(step + 1, rank, attempt, epoch=epoch, ids=names)
        whole += 0 if total is None else total
    state["w"] -= FLOAT32.mean(whole, _GRID, terms=MICROBATCHES)
    state[KEY].step = step + 1


def tell_step(state: State, *, ranks: int, attempt: int, reported: SmallJobHistory) -> None:
    """Report that all ranks have completed the newest step, and their state."""
    step = steps_of(state)
    for rank in range(ranks):
        reported.step(step, rank, attempt)
        reported.state(step, rank, attempt, digest_of(state))


def judged(
    reported: SmallJobHistory, *, steps: int, width: int, ranks_most: int, undone_most: int
) -> str:
    """Return the first promise that a history breaks compared with the undisturbed job, or ""."""
    reference = _undisturbed(steps, width=width, ranks=ranks_most)
    verdict = check(
        reported.history, reference=reference, promises=Promises(undone_most=undone_most)
    )
    return "; ".join(f"{each.check}: {each.message}" for each in verdict.violations[:1])


def digest_of(tensors: Mapping[str, Any]) -> str:
    """Return a digest of every bit of the weights, frozen ones included."""
    return _digest(tensors["w"].numpy(), tensors["frozen"].numpy())


def _frozen() -> torch.Tensor:
    return torch.arange(500, dtype=torch.float32)


def _gradient(ids: Iterable[int], width: int) -> torch.Tensor:
    return torch.from_numpy(_terms(ids, width).astype(np.float32))


def _terms(ids: Iterable[int], width: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    cells = np.arange(3 * width, dtype=np.int64).reshape(width, 3)
    total = np.zeros_like(cells)
    for name in ids:
        total += (cells * (name + 3)) % 17 - 8
    return total


def _digest(*weights: np.ndarray[Any, Any]) -> str:
    whole = b"".join(np.ascontiguousarray(each).tobytes() for each in weights)
    return hashlib.blake2b(whole, digest_size=16).hexdigest()


def _undisturbed(steps: int, *, width: int, ranks: int) -> History:
    """Return the expected history, by plain rules: samples in order, whole numbers, one rank.

    It has the state for as many ``ranks`` as there may be: it is the same on all of them.
    """
    reported, total = SmallJobHistory(), np.zeros((width, 3), dtype=np.int64)
    for step in range(1, steps + 1):
        names = list(_names((step - 1) * _WORK))
        for epoch in sorted({epoch for epoch, _ in names}):
            reported.samples(step, 0, 1, epoch=epoch, ids=[n for e, n in names if e == epoch])
        total += _terms((name for _, name in names), width)
        weights = (-total / MICROBATCHES).astype(np.float32) + np.float32(0)
        digest = _digest(weights, np.arange(500, dtype=np.float32))
        for rank in range(ranks):
            reported.state(step, rank, 1, digest)
        reported.step(step, 0, 1)
    return reported.history


def _names(start: int) -> Iterator[tuple[int, int]]:
    for position in range(start, start + _WORK):
        epoch, offset = divmod(position, SAMPLES)
        yield epoch, Permutation(SAMPLES, seed=SEED, epoch=epoch)[offset]
