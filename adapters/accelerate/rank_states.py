"""The state of each rank: its random generators, and the places of its data loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.adapters.accelerate.loaders import RecordedLoader
from holdfast.adapters.accelerate.positions import LoaderPosition
from holdfast.adapters.accelerate.prepared import numbered
from holdfast.adapters.shared.random_states import GlobalRandomness, seed_all, seed_for
from holdfast.ckpt import StateError


class LoaderPositions:
    """The positions of all recorded loaders, which are equal on all ranks, as a state."""

    def __init__(self) -> None:
        self.loaders: dict[str, RecordedLoader] = {}
        self.loaded: dict[str, LoaderPosition] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the positions by the loaders' names."""
        return {name: each.position.saved() for name, each in self.loaders.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the positions for `RankStates.put_back`."""
        self.loaded = {name: LoaderPosition.of_saved(saved) for name, saved in state_dict.items()}


class RankStates:
    """The random states of this rank, with its loaders, as a state that is loaded in two steps.

    Loading keeps the states; `put_back` applies them once everything else is loaded.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.positions = LoaderPositions()
        self._prepared: list[Any] = []
        self._loaded: Mapping[str, Any] = {}

    def adopt_loaders(self) -> None:
        """Record the positions of all prepared loaders, from their next iteration on.

        Raises ``StateError`` for a loader that is iterated and not known yet, and for two loaders
        with one generator.
        """
        prepared = self._accelerator._dataloaders
        for each in self._active():
            if not any(each is one for one in self._prepared):
                raise StateError(
                    "a loop over a data loader runs that was prepared after "
                    "AcceleratorCheckpoints(...) was made, or that skip_first_batches returned: "
                    "prepare all loaders before, and loop over them alone; load() lets them go on "
                    "where they were"
                )
        for name, loader in numbered("loader", prepared):
            if not any(loader is one for one in self._prepared):
                self.positions.loaders[name] = RecordedLoader(
                    loader, name=name, device=self._accelerator.device
                )
                self._prepared.append(loader)
        self._check_generators()

    def _check_generators(self) -> None:
        owners: dict[int, str] = {}
        for name, loader in self.positions.loaders.items():
            for generator in loader.generators():
                other = owners.setdefault(id(generator), name)
                if other != name:
                    raise StateError(
                        f"{other} and {name} draw from one torch.Generator, so that the order of "
                        "each depends on the other: give each loader a generator of its own"
                    )

    def _active(self) -> list[Any]:
        """Return the loaders over which a loop runs."""
        found = self._accelerator.gradient_state.dataloader_references
        return [each for each in found if each is not None]

    def check_no_loop(self) -> None:
        """Raise ``StateError`` inside a loop over a prepared loader."""
        if self._active():
            raise StateError(
                "load: a loop over a prepared loader runs; leave it first, and loop again after "
                "load()"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the random states of now, and those of the loaders, by name."""
        return {
            "now": GlobalRandomness.taken(self._accelerator.device).saved(),
            "loaders": {name: each.rank_state() for name, each in self.positions.loaders.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the states for `put_back`."""
        self._loaded = state_dict

    def put_back(self, *, data: bool) -> None:
        """Apply the states that were loaded; those of the loaders only if ``data``.

        Raises ``StateError`` if the loaders are others than at the save.
        """
        positions, loaders = self.positions.loaded, self.positions.loaders
        now = self._loaded["now"]
        if "seed" in now:
            seed_all(now["seed"])
        else:
            GlobalRandomness.of_saved(now).put_back(self._accelerator.device)
        common = [GlobalRandomness.taken(self._accelerator.device)]
        if data:
            if positions.keys() != loaders.keys():
                raise StateError(
                    f"the checkpoint has the positions of {len(positions)} data loaders, and "
                    f"{len(loaders)} are prepared: prepare the same ones in the same order, or "
                    "leave them as they are by load(data=False)"
                )
            for name, loader in loaders.items():
                loader.go_on(positions[name], self._loaded["loaders"][name], now=common)


def share_of_rank(values: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return the state of a rank among ``world_size``, from those of all ranks of the save.

    A rank that was not there before reads as rank 0 did, and draws random numbers of its own.
    """
    if rank < len(values):
        return values[rank]
    return {**values[0], "now": {"seed": seed_for(values[0]["now"], rank)}}
