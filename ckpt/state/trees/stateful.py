"""Objects that return their state as a tree, and random generators as such objects."""

from __future__ import annotations

import random
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch

_GENERATORS: Final = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)


@runtime_checkable
class Stateful(Protocol):
    """An object that returns its state as a tree of tensors and plain values, and can load it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state that ``state_dict`` returned earlier."""
        ...


class GeneratorState:
    """A random generator as an object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's position."""
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return {"torch": generator.get_state()}
        if isinstance(generator, np.random.Generator):
            return {"numpy": dict(generator.bit_generator.state)}
        if isinstance(generator, np.random.RandomState):
            return {"numpy": dict(generator.get_state(legacy=False))}
        version, words, spare = generator.getstate()
        return {"python": version, "words": np.array(words, np.uint32), "spare": spare}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generator to a position that ``state_dict`` returned."""
        generator = self._generator
        if isinstance(generator, torch.Generator):
            generator.set_state(state_dict["torch"])
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state_dict["numpy"]
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state_dict["numpy"])
        else:
            words = tuple(state_dict["words"].tolist())
            generator.setstate((state_dict["python"], words, state_dict["spare"]))


def stateful_of(value: object) -> Stateful | None:
    """Return ``value``, or the state of the generator that it is; None if it has no state."""
    if isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom):
        return GeneratorState(value)
    return value if isinstance(value, Stateful) and not isinstance(value, type) else None
