"""One generation's data: its loaders, and a rank's work in a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec
from torch.utils.data import DataLoader, default_collate

from holdfast.ckpt.types import Json
from holdfast.elastic import randomness
from holdfast.elastic.channel.base import Channel
from holdfast.elastic.config import Settings
from holdfast.elastic.data.dealt import DealtLoader
from holdfast.elastic.data.hand import Hand
from holdfast.elastic.data.loaders import (
    LoadedMicrobatch,
    Loader,
    LoaderContext,
    MapLoader,
    StreamLoader,
)
from holdfast.elastic.data.options import Loading, is_iterable, loading_of
from holdfast.elastic.data.order import SampleOrder
from holdfast.elastic.data.sampler import positions, sample_indices
from holdfast.elastic.data.sharing import Sharing
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import LoaderEvent, SharesChanged
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.seeding import seed_host

_UNDEALT: Final = (
    "Islands(data='dealt'): run.microbatches has no loader; make loader = run.loader(dataset) "
    "before the steps, and iterate run.microbatches(loader), or give Islands(data='own')"
)

_Sample_co = TypeVar("_Sample_co", covariant=True)


class MapDataset(Protocol[_Sample_co]):
    """A map-style data set."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> _Sample_co:
        """Return one sample."""


class StepWork:
    """This rank's work in a step: microbatches by number, of a data set, or of a loader.

    ``states`` returns the saved positions of loaders, by name; ``beat`` shows progress. ``hand`` is
    that of an island whose samples the logbook deals.
    """

    def __init__(
        self,
        channel: Channel,
        settings: Settings,
        world: GenerationWorld,
        *,
        states: Callable[[], dict[str, Json]],
        beat: Callable[[], None],
        hand: Hand | None = None,
    ) -> None:
        self._hand = hand
        self._settings, self._world, self._channel = settings, world, channel
        self._loaders: dict[str, Loader] = {}
        # A pipeline's schedule is built for the number of microbatches of its group.
        may_change = settings.shares_by_speed and settings.mesh.pp == 1
        self.sharing = Sharing(
            world.dp,
            settings.batch.microbatches,
            shares=world.record.shares,
            abreast=world.record.mesh.ep,
            gather=world.gather if may_change else None,
            clock=world.guard.own_s,
            tell=self._tell_shares,
        )
        self._site = LoaderContext(
            seed=settings.own_seed,
            microbatches=settings.batch.microbatches,
            states=states,
            abreast=world.record.mesh.ep,
            mine=self.sharing.mine,
            gather=world.gather_groups,
            check=world.guard.check,
            beat=beat,
            emit=self._tell_loading,
        )

    @property
    def share(self) -> int:
        """The number of a step's microbatches that this rank runs."""
        return len(self.sharing.mine())

    def _tell_shares(self, reason: str, shares: Sequence[int]) -> None:
        if self._world.rank == 0:
            self._channel.emit(
                SharesChanged(
                    generation=self._world.generation, shares=tuple(shares), reason=reason
                )
            )

    def _tell_loading(self, event: LoaderEvent) -> None:
        self._channel.emit(msgspec.structs.replace(event, rank=self._world.rank))

    def loader(
        self,
        dataset: Any,
        *,
        batch: int | None,
        shuffle: bool | None,
        order: SampleOrder | Iterable[int] | None,
        name: str,
        factory: Callable[..., DataLoader[Any]],
        options: dict[str, Any],
    ) -> Loader:
        """Make a loader; see `Run.loader`."""
        if name in self._loaders:
            raise ConfigError(f"run.loader: there is a loader {name!r}; give this one name=...")
        loading = loading_of(
            dataset,
            size=self._settings.batch.size,
            shuffle=shuffle,
            order=order,
            factory=factory,
            options=options,
        )
        kind = StreamLoader if is_iterable(loading.dataset) else MapLoader
        loader = self._loaders[name] = (
            kind(loading, self._site, name=name, batch=batch)
            if self._hand is None
            else self._dealt(loading, self._hand, name=name, batch=batch)
        )
        return loader

    def _dealt(self, loading: Loading, hand: Hand, *, name: str, batch: int | None) -> DealtLoader:
        """Make the loader of what the logbook deals: all islands find the same samples."""
        if is_iterable(loading.dataset):
            raise ConfigError(
                f"Islands(data='dealt'): {type(loading.dataset).__name__} is iterable, so the "
                "logbook cannot deal its samples by number; give a data set that can be indexed, "
                "or Islands(data='own')"
            )
        site = dataclasses.replace(self._site, seed=self._settings.seed)
        return DealtLoader(loading, site, name=name, batch=batch, hand=hand)

    def pieces(self, data: MapDataset[Any] | Loader | None, *, step: int) -> list[LoadedMicrobatch]:
        """Return this rank's microbatches of ``step``; never empty."""
        if isinstance(data, Loader):
            return data.pieces()
        if self._hand is not None:
            raise ConfigError(_UNDEALT)
        return [
            LoadedMicrobatch(
                microbatch=m,
                weight=1.0,
                samples=1,
                fetch=functools.partial(self._fetch, data, step=step, microbatch=m),
            )
            for m in self.sharing.mine()
        ]

    def samples_of(self, data: MapDataset[Any] | Loader | None) -> int:
        """Return the samples of the step on all ranks, after `pieces`.

        A loop that is given the numbers of microbatches has those that `Batch` says.
        """
        batch = self._settings.batch
        return data.drawn if isinstance(data, Loader) else batch.microbatches * batch.size

    def renew(self, data: MapDataset[Any] | Loader | None) -> None:
        """Let the next pass take fresh samples of a loader. Raises ``ConfigError`` for others."""
        if self._hand is not None:
            raise ConfigError(
                "run.microbatches(..., fresh=True) with Islands(data='dealt'): the logbook deals "
                "an island one batch for each step; leave fresh=True out, or give "
                "Islands(data='own')"
            )
        if not isinstance(data, Loader):
            raise ConfigError(
                "run.microbatches(..., fresh=True) needs a loader, whose position is saved: make "
                "loader = run.loader(dataset) before the steps, and give run.microbatches(loader)"
            )
        data.advance()

    def _fetch(self, dataset: MapDataset[Any] | None, *, step: int, microbatch: int) -> Any:
        if dataset is None:
            return microbatch
        batch, seed = self._settings.batch, self._settings.own_seed
        wanted = positions(
            step=step, microbatch=microbatch, microbatches=batch.microbatches, size=batch.size
        )
        indices = sample_indices(wanted, samples=len(dataset), seed=seed)
        seed_host(randomness.stream_seed(seed, "samples", step, microbatch))
        return default_collate([dataset[index] for index in indices])

    def advance(self) -> None:
        """Move every loader that was used past its step."""
        for loader in self._loaders.values():
            loader.advance()

    def take_waited_s(self) -> float:
        """Return the seconds waited for data since the last call."""
        return sum(loader.take_waited_s() for loader in self._loaders.values())

    def close(self) -> None:
        """End every process that loads data."""
        for loader in self._loaders.values():
            loader.close()
