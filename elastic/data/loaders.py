"""Loaders, made by `Run.loader`: their batches stay the same across failures and resizes.

A loader's position is part of the run's state. It moves when a step is complete, not when a batch
is fetched. After a resize, a crash or a roll-back, samples that were read ahead but not trained are
read again by the rank that then runs their microbatch.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from holdfast.ckpt import torch_private
from holdfast.ckpt.types import Json
from holdfast.elastic import randomness
from holdfast.elastic.data.options import Loading
from holdfast.elastic.data.order import SampleOrder
from holdfast.elastic.data.plan import (
    PlannedMicrobatch,
    Step,
    check_batch,
    next_step,
    parts,
    round_of,
    steps_from,
    weight_of,
)
from holdfast.elastic.data.samples import Requests, SeededSamples
from holdfast.elastic.data.streams import Shard, ShardPlan, Shards, ShardStep
from holdfast.elastic.data.workers.feed import DataWorkerDiedError, Feed, WorkerStart
from holdfast.elastic.data.workers.starting import Starting
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import LoaderEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderContext:
    """A loader's access to its run.

    ``states`` returns the saved positions of all loaders, by name. ``abreast`` microbatches run at
    the same time, see `shares.part`. ``mine`` returns the microbatches of this rank, ``gather``
    every rank's value (collective). ``check`` raises if the generation is over, ``beat`` shows
    progress.
    """

    seed: int
    microbatches: int
    abreast: int
    states: Callable[[], dict[str, Json]]
    mine: Callable[[], Sequence[int]]
    gather: Callable[[Json], list[Json]]
    check: Callable[[], None]
    beat: Callable[[], None]
    emit: Callable[[LoaderEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedMicrobatch:
    """A microbatch to run: its ``weight`` in the mean gradient, and its number of ``samples``.

    Both are 0 for a stand-in. ``found`` is its weight among the others if the caller weighs them.
    """

    microbatch: int
    weight: float
    samples: int
    fetch: Callable[[], Any]
    found: float | None = None

    @property
    def counted(self) -> float:
        """The number by which a logged value counts in its mean."""
        return self.samples if self.found is None else self.found


class Loader(ABC):
    """Microbatches of a data set, for ``run.microbatches(loader)``; made by ``run.loader``.

    Every epoch visits each sample once, over any sequence of resizes and failures.
    """

    def __init__(
        self, loading: Loading, site: LoaderContext, *, name: str, batch: int | None
    ) -> None:
        self.name = name
        self._loading, self._site = loading, site
        self.batch = loading.size * site.microbatches if batch is None else batch
        check_batch(self.batch, microbatches=site.microbatches)
        self._feed: Feed | None = None
        self._feeds: Sequence[int] = ()
        self._used, self._waited_s = False, 0.0
        self._starting = Starting(loading.dataset, loading.options, name=name, tell=site.emit)

    @property
    def dataset(self) -> Any:
        """The data set."""
        return self._loading.dataset

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The number of complete epochs, or the epoch of the present step, from 0."""

    @abstractmethod
    def reaches(self, epochs: int) -> bool:
        """Return whether ``epochs`` epochs are complete; collective for iterable data sets."""

    @property
    @abstractmethod
    def drawn(self) -> int:
        """The samples of the present step on all ranks, after `pieces`."""

    @abstractmethod
    def _draw(self) -> list[LoadedMicrobatch]: ...

    @abstractmethod
    def _moved(self) -> dict[str, Json]: ...

    @abstractmethod
    def _after(self, step: int) -> dict[str, Json]: ...

    @abstractmethod
    def _open(self) -> Feed: ...

    def pieces(self) -> list[LoadedMicrobatch]:
        """Return this rank's microbatches of the step, the same until `advance`."""
        self._used = True
        return self._draw()

    def advance(self) -> None:
        """Move past the complete step's samples, if they were used."""
        if self._used:
            self._site.states()[self.name] = self._moved()
            self._used = False

    def begin_at(self, step: int) -> None:
        """Take the position after ``step`` steps, of which this run made none.

        Raises ``ConfigError`` for an iterable data set, which tells its position only by reading.
        """
        self._site.states()[self.name] = self._after(step)

    def take_waited_s(self) -> float:
        """Return the seconds waited for data since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        """End the worker processes; drop the batches read ahead."""
        if self._feed is not None:
            self._feed.close()
        self._feed = None

    def worker_pids(self) -> tuple[int, ...]:
        """Return the processes that load data for this rank now."""
        return self._feed.pids() if self._feed else ()

    def _state(self) -> Any:
        return self._site.states().get(self.name)

    def _from_processes(self, dataset: Any, *, workers: int, **more: Any) -> Feed:
        """Open a feed of ``dataset`` with the user's options and ``workers`` processes."""
        options = {**self._loading.options, **more, "num_workers": workers}
        if workers:
            options["worker_init_fn"] = WorkerStart(options.get("worker_init_fn"))
            options["multiprocessing_context"] = self._starting.context()
        else:
            options.pop("prefetch_factor", None)
            options.pop("multiprocessing_context", None)
        seed = randomness.stream_seed(self._site.seed, f"loader {self.name}")
        generator = torch.Generator().manual_seed(seed)
        made = self._loading.factory(dataset, generator=generator, **options)
        return Feed(made, first_batch_s=self._loading.first_batch_s * self._starting.patience)

    def _get(self) -> Any:
        """Return the feed's next item. Raises ``DataWorkerDiedError`` after closing it."""
        feed = self._feed
        if feed is None:
            feed = self._feed = self._open()
        start = time.perf_counter()
        try:
            item = feed.get(self._site.check, beat=self._site.beat)
        except DataWorkerDiedError as died:
            self.close()
            self._starting.failed(died, gave=feed.gave)
            raise
        finally:
            self._waited_s += time.perf_counter() - start
        self._starting.worked()
        return item

    def _handed_out(self, batch: Any) -> Any:
        """Return a copy, because another pass of the step may take the batch again."""
        return torch_private.map_tree(_copied, batch)


class _MapState(msgspec.Struct, kw_only=True):
    epoch: int
    offset: int
    samples: int
    order: Json


class MapLoader(Loader):
    """A loader of a data set that can be indexed; ``len()`` is its steps in an epoch."""

    def __init__(
        self, loading: Loading, site: LoaderContext, *, name: str, batch: int | None
    ) -> None:
        super().__init__(loading, site, name=name, batch=batch)
        if loading.order is None:
            raise ConfigError("a data set that can be indexed needs an order")
        self._order: SampleOrder = loading.order
        self._samples = len(loading.dataset)
        if self._samples < 1:
            raise ConfigError(f"run.loader: the data set of {name!r} is empty")
        self._length = self._order.length(self._samples)
        self._step: Step | None = None
        self._parts: list[PlannedMicrobatch] = []
        self._batches: list[Any] = []

    def __len__(self) -> int:
        return 1 + (self._length - 1) // self.batch

    def _place(self) -> _MapState:
        found = self._state()
        described = self._order.describe()
        if found is None:
            return _MapState(epoch=0, offset=0, samples=self._samples, order=described)
        saved: _MapState = as_kind(found, _MapState, self.name)
        if (saved.samples, saved.order) != (self._samples, described):
            raise ConfigError(
                f"loader {self.name!r} was saved with {saved.samples} samples in the order "
                f"{saved.order}, now it has {self._samples} in the order {described}: give the "
                "same data set, or another name= to begin with its first epoch"
            )
        return saved

    @property
    def epoch(self) -> int:
        """The number of complete epochs."""
        if self._step is not None:
            return self._step.epoch
        place = self._place()
        return place.epoch + (place.offset >= self._length)

    def reaches(self, epochs: int) -> bool:
        """Return whether ``epochs`` epochs are complete."""
        return self.epoch >= epochs

    @property
    def drawn(self) -> int:
        """The samples of the present step on all ranks."""
        return 0 if self._step is None else self._step.count

    def _draw(self) -> list[LoadedMicrobatch]:
        if self._step is None:
            self._step = self._next_step()
        mine = self._site.mine()
        self._parts = self._parts_of(self._step, mine)
        if self._feed is not None and mine != self._feeds:
            self.close()
            self._batches = []
        return [
            LoadedMicrobatch(
                microbatch=part.microbatch,
                weight=part.weight,
                samples=len(part.positions) if part.weight else 0,
                fetch=functools.partial(self._fetch, number),
            )
            for number, part in enumerate(self._parts)
        ]

    def _next_step(self) -> Step:
        """Return the step that begins at the saved position."""
        place = self._place()
        return next_step(
            epoch=place.epoch, offset=place.offset, length=self._length, batch=self.batch
        )

    def _steps_after(self, step: Step) -> Iterator[Step]:
        """Yield the steps that follow, as far as they are known."""
        return steps_from(
            epoch=step.epoch,
            offset=step.start + step.count,
            length=self._length,
            batch=self.batch,
        )

    def _fetch(self, number: int) -> Any:
        while len(self._batches) <= number:
            try:
                self._batches.append(self._get())
            except DataWorkerDiedError:
                continue
        return self._handed_out(self._batches[number])

    def _open(self) -> Feed:
        self._feeds = self._site.mine()
        requests = Requests(self._ahead(), self._indices)
        dataset = SeededSamples(self._loading.dataset, seed=self._site.seed)
        return self._from_processes(dataset, workers=self._loading.workers, batch_sampler=requests)

    def _indices(self, positions: range, epoch: int) -> list[int]:
        return self._order.indices(
            positions, samples=self._samples, seed=self._site.seed, epoch=epoch
        )

    def _ahead(self) -> Iterator[PlannedMicrobatch]:
        """Yield the step's microbatches that are not fetched yet, then those of later steps."""
        step, mine = self._step, self._feeds
        if step is None:
            return
        yield from self._parts[len(self._batches) :]
        for later in self._steps_after(step):
            yield from self._parts_of(later, mine)

    def _parts_of(self, step: Step, mine: Sequence[int]) -> list[PlannedMicrobatch]:
        site = self._site
        return parts(step, mine, microbatches=site.microbatches, abreast=site.abreast)

    def _moved(self) -> dict[str, Json]:
        step, fetched = self._step, len(self._batches)
        if step is None:
            raise ConfigError(f"loader {self.name!r} has no step to complete")
        if fetched < len(self._parts):  # a loop was left early: the feed is not at the position
            self.close()
        self._step, self._parts, self._batches = None, [], []
        return self._at(step.epoch, step.start + step.count)

    def _after(self, step: int) -> dict[str, Json]:
        epoch, steps = divmod(step, len(self))
        return self._at(epoch, steps * self.batch)

    def _at(self, epoch: int, offset: int) -> dict[str, Json]:
        described = self._order.describe()
        return {"epoch": epoch, "offset": offset, "samples": self._samples, "order": described}


class _StreamState(msgspec.Struct, kw_only=True):
    epoch: int
    batch: int
    shards: list[Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """One step's rows of this rank, and the numbers of samples and the states of all ranks."""

    epoch: int
    rows: list[ShardStep]
    counts: list[int]
    states: list[Json]


class StreamLoader(Loader):
    """A loader of an iterable data set, which is split into one shard for each microbatch."""

    def __init__(
        self, loading: Loading, site: LoaderContext, *, name: str, batch: int | None
    ) -> None:
        super().__init__(loading, site, name=name, batch=batch)
        self._drawn: _Drawn | None = None
        self._epoch_ahead = 0
        whole = Step(epoch=0, start=0, count=self.batch)
        shards = range(site.microbatches)
        self._sizes = tuple(len(whole.part(m, of=site.microbatches)) for m in shards)

    def _place(self) -> _StreamState:
        found = self._state()
        if found is None:
            shards: list[Json] = [None] * self._site.microbatches
            return _StreamState(epoch=0, batch=self.batch, shards=shards)
        saved: _StreamState = as_kind(found, _StreamState, self.name)
        if saved.batch != self.batch:
            raise ConfigError(
                f"loader {self.name!r} was saved with batch={saved.batch}, now {self.batch}: the "
                "shards of an iterable data set continue with the same batch only"
            )
        return saved

    @property
    def epoch(self) -> int:
        """The epoch of the last samples drawn, from 0."""
        return self._place().epoch if self._drawn is None else self._drawn.epoch

    def reaches(self, epochs: int) -> bool:
        """Return whether ``epochs`` epochs are complete, by drawing the next step; collective."""
        return self._ahead().epoch >= epochs

    @property
    def drawn(self) -> int:
        """The samples of the present step on all ranks."""
        return 0 if self._drawn is None else sum(self._drawn.counts)

    def _ahead(self) -> _Drawn:
        if self._drawn is None:
            self._drawn = self._draw_step()
        return self._drawn

    def _draw_step(self) -> _Drawn:
        epoch = self._place().epoch
        if self._feed is not None and self._site.mine() != self._feeds:
            self.close()
        for self._epoch_ahead in (epoch, epoch + 1):
            drawn = self._gathered(self._rows())
            if sum(drawn.counts):
                return drawn
            self.close()  # all shards have ended, so the next epoch begins
        raise ConfigError(f"run.loader: the iterable data set of {self.name!r} gives no samples")

    def _rows(self) -> list[ShardStep]:
        """Return a row of each of this rank's shards."""
        while True:
            try:
                return [row for _ in range(self._processes()) for row in self._get()]
            except DataWorkerDiedError:
                continue

    def _processes(self) -> int:
        return max(1, min(self._loading.workers, len(self._site.mine())))

    def _open(self) -> Feed:
        site, place = self._site, self._place()
        self._feeds = mine = site.mine()
        states = dict(enumerate(place.shards)) if self._epoch_ahead == place.epoch else {}
        shards = Shards(
            self._loading.dataset,
            mine,
            plan=self._plan(self._epoch_ahead),
            states={m: states.get(m) for m in mine},
            collate=self._loading.collate,
        )
        workers = self._processes() if self._loading.workers else 0
        return self._from_processes(shards, workers=workers, batch_size=None, collate_fn=_as_it_is)

    def _plan(self, epoch: int) -> ShardPlan:
        return ShardPlan(seed=self._site.seed, epoch=epoch, sizes=self._sizes)

    def _gathered(self, rows: list[ShardStep]) -> _Drawn:
        mine: Json = [[row.microbatch, row.count, row.state] for row in rows]
        everywhere = sorted(
            (found for of_rank in self._site.gather(mine) for found in of_rank),
            key=lambda found: int(found[0]),
        )
        return _Drawn(
            epoch=self._epoch_ahead,
            rows=sorted(rows, key=lambda row: row.microbatch),
            counts=[int(count) for _, count, _ in everywhere],
            states=[state for *_, state in everywhere],
        )

    def _draw(self) -> list[LoadedMicrobatch]:
        drawn = self._ahead()
        total, microbatches = sum(drawn.counts), self._site.microbatches
        found = []
        for row in drawn.rows:
            beside = round_of(row.microbatch, abreast=self._site.abreast)
            if row.count:
                piece = LoadedMicrobatch(
                    microbatch=row.microbatch,
                    weight=weight_of(row.count, total=total, microbatches=microbatches),
                    samples=row.count,
                    fetch=functools.partial(self._handed_out, row.batch),
                )
                found.append(piece)
            elif any(drawn.counts[microbatch] for microbatch in beside):
                found.append(self._stand_in(row.microbatch))
        return found or [self._stand_in(drawn.rows[0].microbatch)]

    def _stand_in(self, microbatch: int) -> LoadedMicrobatch:
        return LoadedMicrobatch(microbatch=microbatch, weight=0.0, samples=0, fetch=self._any_batch)

    def _any_batch(self) -> Any:
        """Return the first batch of any shard, for a rank whose own shards have ended."""
        plan = self._plan(self._epoch_ahead)
        for microbatch in range(self._site.microbatches):
            if samples := Shard(self._loading.dataset, microbatch, plan=plan).draw():
                return self._loading.collate(samples)
        raise ConfigError(f"run.loader: the iterable data set of {self.name!r} gives no samples")

    def _moved(self) -> dict[str, Json]:
        drawn = self._ahead()
        self._drawn = None
        return {"epoch": drawn.epoch, "batch": self.batch, "shards": drawn.states}

    def _after(self, step: int) -> dict[str, Json]:
        raise ConfigError(
            f"loader {self.name!r} cannot begin at step {step}: its data set is iterable, and only "
            "reading tells the position; begin with its first sample, or give a data set that can "
            "be indexed"
        )


def as_kind(state: Any, kind: Any, name: str) -> Any:
    """Return a saved place as one of a kind of loader. Raises ``ConfigError`` for another one."""
    try:
        return msgspec.convert(state, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the saved place of loader {name!r} is not one of this kind of data set ({error}): "
            "give another name= to begin with its first epoch"
        ) from error


def _as_it_is(rows: list[ShardStep]) -> list[ShardStep]:
    return rows


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
