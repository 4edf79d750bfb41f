"""The random states of each rank as an entry of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.adapters.shared.random_states import GlobalRandomness, seed_all, seed_for
from holdfast.ckpt import PerRank


class RandomGenerators:
    """The global generators of Python, NumPy and torch as an object with a state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Return the states of now."""
        return GlobalRandomness.taken(self._device).saved()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give the generators a saved state, or a seed that follows from one."""
        if "seed" in state_dict:
            seed_all(state_dict["seed"])
        else:
            GlobalRandomness.of_saved(state_dict).put_back(self._device)


def random_states(device: torch.device) -> PerRank:
    """Return an entry of a state for this rank's generators: Python's, NumPy's and torch's.

    ``device`` is that of the rank (``fabric.device``); the generator of a CUDA device is kept too.
    A rank that was not there at the save draws numbers of its own, which follow from rank 0's.
    """
    return PerRank(RandomGenerators(device), on_resize=_share)


def _share(values: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    return values[rank] if rank < len(values) else {"seed": seed_for(values[0], rank)}
