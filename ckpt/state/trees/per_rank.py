"""State that belongs to one rank: its names, and what becomes of it when ranks come and go.

The entry ``env`` of rank 2 is stored under ``env@2``: its tree among the ``rank_values`` of the
rank that writes it, and every tensor in it under a name that begins so. No other rank holds these
names, so nothing about them is agreed. Indexes of older checkpoints have the bare name; the writer
says whose it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from holdfast.ckpt.errors import ArgumentError
from holdfast.ckpt.geometry.shard_index import owner_of
from holdfast.ckpt.types import Json

Merge: TypeAlias = Callable[[list[Any], int, int], Any]
"""Returns a rank's share of all ranks' values: ``(values, rank, world_size) -> value``."""

OnResize: TypeAlias = Literal["keep", "drop"] | Merge


class PerRank:
    """State that every rank keeps for itself: a random generator, an environment, a buffer.

    ``value`` is a tensor or NumPy array, a generator of torch's, NumPy's or Python's, an object
    with ``state_dict``/``load_state_dict``, a plain value, or lists and dicts of these, of any
    size. It is restored in place at the rank of the same number. If its outermost part cannot be
    changed in place (a number), ``value`` is replaced.

    ``on_resize`` says what happens to the values of ranks that the new world does not have:

    - ``"keep"``: other ranks carry them along, in host memory and in every snapshot, until there is
      a rank of that number again;
    - ``"drop"``: they are forgotten, and an event says so;
    - a function ``merge(values, rank, world_size)``: called at every rank after each change of the
      number of ranks. ``values`` are those of all earlier ranks, in rank order, and the function
      returns the value of this rank. An object comes and goes as its ``state_dict``.

    A rank without a saved value keeps the one it was built with, and an event says so. Raises
    ``ArgumentError`` for another ``on_resize``.
    """

    __slots__ = ("on_resize", "value")

    def __init__(self, value: Any, *, on_resize: OnResize = "keep") -> None:
        if on_resize not in ("keep", "drop") and not callable(on_resize):
            raise ArgumentError(
                f"PerRank(on_resize={on_resize!r}): it must be 'keep', 'drop', or a function "
                "merge(values, rank, world_size)"
            )
        self.value, self.on_resize = value, on_resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class CarriedRanks:
    """The values of ranks that this world does not have, as an entry of the state.

    A restore puts them here, and every snapshot saves them again under their own names.
    """

    def __init__(self) -> None:
        self.values: dict[str, Json] = {}
        self.tensors: dict[str, torch.Tensor] = {}


def own_name(path: str, rank: int) -> str:
    """Return the name under which a rank's own value of ``path`` is stored."""
    return f"{path}@{rank}"


SavedRanks: TypeAlias = Mapping[str, Mapping[int, Json]]
"""Per path: the tree that each rank saved."""


def by_path(written: Iterable[tuple[int, Mapping[str, Json]]]) -> dict[str, dict[int, Json]]:
    """Return all ranks' values by path; ``written`` are the writers with their ``rank_values``."""
    found: dict[str, dict[int, Json]] = {}
    for writer, values in written:
        for name, tree in values.items():
            path, rank = owner_of(name, writer=writer)
            found.setdefault(path, {})[rank] = tree
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """The treatment of all ranks' saved values at one rank of a new world, by path or own name.

    ``taken`` are its own, ``merged`` those it computes from all; ``built`` has none and stays as it
    was built. It carries ``carried`` for ranks that are gone. ``dropped`` names what nobody keeps,
    the same at every rank.
    """

    taken: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    built: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def inherit(
    wanted: Mapping[str, PerRank],
    saved: SavedRanks,
    *,
    rank: int,
    world_size: int,
    can_carry: bool,
) -> Inheritance:
    """Decide for every ``wanted`` path; values that cannot be carried are dropped."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, holder in wanted.items():
        ranks = saved.get(path, {})
        if callable(holder.on_resize) and ranks and ranks.keys() != set(range(world_size)):
            found["merged"].append(path)
            continue
        found["taken" if rank in ranks else "built"].append(path)
        for gone in sorted(each for each in ranks if each >= world_size):
            if holder.on_resize == "drop" or not can_carry:
                found["dropped"].append(own_name(path, gone))
            elif gone % world_size == rank:
                found["carried"].append(own_name(path, gone))
    return Inheritance(**{what: tuple(names) for what, names in found.items()})
