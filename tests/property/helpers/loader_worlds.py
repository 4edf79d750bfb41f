"""Worlds of loaders in one process: the batches of several ranks, and their histories.

A `World` is one generation. Its ranks' gather answers with the values of a rank that runs every
microbatch, after checking that the asking rank got the same for its share.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from holdfast.ckpt.types import Json
from holdfast.elastic.data.loaders import Loader, LoaderContext, MapLoader, StreamLoader
from holdfast.elastic.data.options import is_iterable, loading_of
from holdfast.elastic.planning.shares import part

SEED = 5


def as_list(samples: list[Any]) -> list[Any]:
    """Collate nothing."""
    return samples


class Numbers:
    """A data set whose samples are their indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """``size`` numbers, divided among the workers it sees; its place is state if ``stateful``."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        mine = range(info.id, self.size, info.num_workers)
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1]
        self.at = 0  # as many data sets do, for another epoch


class StatefulStream(Stream):
    """The same, with its place as state."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def make_loader(dataset: Any, site: LoaderContext, *, batch: int, **how: Any) -> Loader:
    """Return a loader without a run."""
    order, factory = how.pop("order", None), how.pop("factory", DataLoader)
    options = {"collate_fn": as_list, **how}
    loading = loading_of(
        dataset, size=1, shuffle=None, order=order, factory=factory, options=options
    )
    kind = StreamLoader if is_iterable(loading.dataset) else MapLoader
    return kind(loading, site, name="data", batch=batch)


def alone(
    states: dict[str, Json],
    microbatches: int,
    *,
    mine: Callable[[], Sequence[int]] | None = None,
    **more: Any,
) -> LoaderContext:
    """Return the context of a rank that is alone."""
    return LoaderContext(
        **{
            "seed": SEED,
            "microbatches": microbatches,
            "abreast": 1,
            "states": lambda: states,
            "mine": mine or (lambda: range(microbatches)),
            "gather": lambda value: [value],
            "check": lambda: None,
            "beat": lambda: None,
            "emit": lambda kind, **fields: None,
            **more,
        }
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """The training of one step: samples by microbatch, and the sum of all weights."""

    epoch: int
    samples: dict[int, tuple[Any, ...]]
    weight: float


class World:
    """One generation of ``size`` ranks over the saved ``states``; ``shares`` may be changed."""

    def __init__(
        self,
        size: int,
        states: dict[str, Json],
        *,
        microbatches: int,
        make: Callable[[LoaderContext], Loader],
        shares: Sequence[int] = (),
        abreast: int = 1,
    ) -> None:
        self.shares, self._abreast = shares, abreast
        self._rows: dict[int, Json] = {}
        self._whole = make(alone(copy.deepcopy(states), microbatches, gather=self._note))
        self._states = [copy.deepcopy(states) for _ in range(size)]
        self._loaders = [
            make(
                alone(
                    self._states[rank],
                    microbatches,
                    mine=functools.partial(self._part, microbatches, rank, size),
                    abreast=abreast,
                    gather=self._answer,
                )
            )
            for rank in range(size)
        ]

    def _part(self, microbatches: int, rank: int, size: int) -> range:
        return part(microbatches, rank=rank, ranks=size, shares=self.shares, abreast=self._abreast)

    def _note(self, value: Any) -> list[Json]:
        self._rows = {row[0]: row for row in value}
        self._history.append(self._rows)
        return [value]

    def _answer(self, value: Any) -> list[Json]:
        rows = self._history[self._asked]
        self._asked += 1
        assert all(rows[row[0]] == row for row in value), (value, rows)
        return [list(rows.values())]

    def step(self) -> Seen:
        """Run one step on every rank and complete it; all ranks end with the same state."""
        self._history: list[dict[int, Json]] = []
        whole = _run(self._whole)
        parts = []
        counts = []
        for loader in self._loaders:
            self._asked = 0
            parts.append(_run(loader))
            counts.append(len(loader.pieces()))
        for at in range(0, len(counts), self._abreast):
            assert len(set(counts[at : at + self._abreast])) == 1, "a rank would wait for ever"
        samples = {m: drawn for each in parts for m, drawn in each.samples.items()}
        assert samples == whole.samples
        assert sum(len(each.samples) for each in parts) == len(samples), "a microbatch ran twice"
        for loader in (self._whole, *self._loaders):
            loader.advance()
        assert all(states == self._states[0] for states in self._states)
        weight = round(sum(each.weight for each in parts), 9)  # added up in another order
        return Seen(whole.epoch, samples, weight)

    def look_ahead(self) -> None:
        """Ask whether an epoch is complete, as a loop over epochs does before a step."""
        self._history = []
        self._whole.reaches(1)
        for loader in self._loaders:
            self._asked = 0
            loader.reaches(1)

    @property
    def states(self) -> dict[str, Json]:
        """The saved places, as a snapshot has them."""
        return copy.deepcopy(self._states[0])

    def read_ahead(self) -> None:
        """Begin a step on every rank that is never completed."""
        for loader in self._loaders:
            if isinstance(loader, MapLoader):
                _run(loader)

    def close(self) -> None:
        """End the generation."""
        for loader in (self._whole, *self._loaders):
            loader.close()


def _run(loader: Loader) -> Seen:
    samples, weight = {}, 0.0
    for piece in loader.pieces():
        batch = piece.fetch()
        assert batch, "every rank has something to run"
        assert len(batch) == piece.samples or not piece.samples
        weight += piece.weight
        if piece.samples:
            samples[piece.microbatch] = tuple(batch)
    return Seen(loader.epoch, samples, weight)
