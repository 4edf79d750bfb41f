"""Sets the global random generators of torch, NumPy and Python, and the run's named ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from holdfast.elastic import randomness


class _Named:
    """The generators of `named`, and the last seed of `seed_all`."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], torch.Generator] = {}
        self._last = 0

    def seed(self, seed: int) -> None:
        """Seed each from ``seed`` and its name."""
        self._last = seed
        for (name, _), generator in self._made.items():
            self._seed(generator, name)

    def get(self, name: str, device: torch.device) -> torch.Generator:
        found = self._made.get((name, str(device)))
        if found is None:
            found = self._made[name, str(device)] = torch.Generator(device)
            self._seed(found, name)
        return found

    def every(self) -> list[torch.Generator]:
        return list(self._made.values())

    def drop(self) -> None:
        self._made.clear()

    def _seed(self, generator: torch.Generator, name: str) -> None:
        generator.manual_seed(randomness.stream_seed(self._last, f"generator {name}"))


_NAMED = _Named()


def seed_all(seed: int) -> None:
    """Seed every global generator, including those of devices, with the 63-bit ``seed``.

    The generators of `named` get seeds that follow from it and their names.
    """
    _seed_devices(seed)
    torch.default_generator.manual_seed(seed)
    _seed_plain(seed)
    _NAMED.seed(seed)


def named(name: str, device: torch.device) -> torch.Generator:
    """Return the generator of this name on a device, the same one until `drop_named`.

    It is seeded whenever the global generators are, and like them global to the process.
    """
    return _NAMED.get(name, device)


def every_named() -> list[torch.Generator]:
    """Return the generators that `named` made, until `drop_named`."""
    return _NAMED.every()


def drop_named() -> None:
    """Seed the generators of `named` no more."""
    _NAMED.drop()


def seed_host(seed: int) -> None:
    """Seed the CPU's generators, which reading samples uses."""
    torch.default_generator.manual_seed(seed)
    _seed_plain(seed)


@contextmanager
def kept() -> Iterator[None]:
    """Leave the CPU's global generators as they were, whatever happens inside."""
    torch_state, numpy_state, python_state = (
        torch.get_rng_state(),
        np.random.get_state(),
        random.getstate(),
    )
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _seed_devices(seed: int) -> None:
    """Seed the devices' generators, now or as soon as their driver is initialised.

    ``torch.manual_seed`` formats a traceback for each kind of device that is not initialised, also
    where torch has none of the kind: a sixth of the time of a small model's steps.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    elif torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(seed)


def _seed_plain(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
