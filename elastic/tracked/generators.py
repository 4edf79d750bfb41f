"""Random generators of torch, NumPy and Python: their kinds, and their states as values."""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np
import torch

GENERATORS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""The kinds of generators."""

_BLOCK_WORDS: Final = 624
"""Words of the Mersenne Twister that one of its steps makes anew."""

_MOST_BLOCKS: Final = 1024


def state_of(generator: Any) -> object:
    """Return the state of a generator as a comparable value; None for an object that is none.

    It calls no code of the user's, also where a subclass has its own.
    """
    if isinstance(generator, torch.Generator):
        return torch.Generator.get_state(generator).numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _plain(np.random.RandomState.get_state(generator, legacy=False))
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return random.Random.getstate(generator)
    return None


def global_generators() -> list[object]:
    """Return the generators that functions draw from to which no generator is given."""
    found: list[object] = [torch.default_generator, *torch.cuda.default_generators]
    return [*found, random.seed.__self__, np.random.normal.__self__]  # type: ignore[attr-defined]


def was_seeded(generator: Any, *, before: object, after: object) -> bool:
    """Return whether a generator was seeded anew between two of its states.

    False where it may have been drawn from only: also where it got the seed again that it had.
    """
    if isinstance(generator, torch.Generator):
        return _seed_of(before) != _seed_of(after)
    if isinstance(generator, random.Random):
        return not _leads_to(before, after)
    if isinstance(generator, np.random.RandomState):
        states = (_as_python(before), _as_python(after))
        return None not in states and not _leads_to(*states)
    return False


def _seed_of(state: object) -> bytes:
    """Return the seed in the state of a torch generator, which begins with it on every device."""
    return state[:8] if isinstance(state, bytes) else b""


def _plain(value: Any) -> object:
    """Return nested dicts with arrays as something that can be compared."""
    if isinstance(value, dict):
        return tuple((key, _plain(each)) for key, each in value.items())
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _as_python(state: Any) -> object:
    """Return the state of a NumPy Mersenne Twister as Python's; None of another generator."""
    words = dict(dict(state)["state"])
    if "key" not in words:
        return None
    key = np.frombuffer(words["key"], dtype=np.uint32).tolist()
    return 3, (*key, words["pos"]), None


def _leads_to(before: Any, after: Any) -> bool:
    """Return whether draws lead from one state of a Mersenne Twister to another."""
    *words, at = after[1]
    twister = random.Random()
    twister.setstate((before[0], before[1], None))
    if list(before[1][:-1]) == words:
        return bool(at >= before[1][-1])
    for _ in range(_MOST_BLOCKS):
        twister.getrandbits(32 * _BLOCK_WORDS)
        if list(twister.getstate()[1][:-1]) == words:
            return True
    return False
