"""Encoding of trees as JSON, in which tensors and arrays are references to stored tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.state import plain
from holdfast.ckpt.state.local_boxes import LEAVES, Leaf
from holdfast.ckpt.state.trees.arrays import tensor_of
from holdfast.ckpt.state.trees.per_rank import PerRank, own_name
from holdfast.ckpt.state.trees.stateful import stateful_of
from holdfast.ckpt.types import Json

REFERENCES = ("$tensor", "$array")
"""Tags of references to stored tensors."""


class TakeTensor(Protocol):
    """Takes a tensor of a tree and returns the name under which it is stored.

    ``own`` says whether it belongs to this rank alone.
    """

    def __call__(self, path: str, leaf: Leaf, *, own: bool) -> str:
        """Take one tensor."""
        ...


class TreeEncoder:
    """Encodes trees of ``rank``; ``take`` gets their tensors.

    ``paths`` lists all that is no plain value, in order. ``per_rank`` has the `PerRank` entries by
    path, and ``rank_values`` their trees by this rank's own names. ``direct`` are the paths of
    tensors and arrays that a `PerRank` holds itself, not in an object.
    """

    def __init__(self, *, rank: int, take: TakeTensor) -> None:
        self._rank, self._take = rank, take
        self.paths: list[str] = []
        self.per_rank: dict[str, PerRank] = {}
        self.rank_values: dict[str, Json] = {}
        self.direct = set[str]()

    def encode(self, value: Any, path: str) -> Json:
        """Return the tree of an object with ``state_dict``."""
        return plain.encode(value, path, leaf=self._leaf)

    def add(self, path: str, holder: PerRank) -> None:
        """Encode this rank's own value of ``path`` into ``rank_values``."""
        own = own_name(path, self._rank)
        self.per_rank[path] = holder
        self.rank_values[own] = plain.encode(holder.value, own, leaf=self._direct_leaf)

    def _leaf(self, path: str, value: Any) -> Json:
        self.paths.append(path)
        if isinstance(value, LEAVES):
            return {"$tensor": self._take(path, value, own=False)}
        if isinstance(value, np.ndarray):
            return {"$array": self._take(path, tensor_of(path, value, filled=False), own=False)}
        if isinstance(value, PerRank):
            self.add(path, value)
            return {"$rank": path}
        return plain.refuse(path, value)

    def _direct_leaf(self, path: str, value: Any) -> Json:
        if isinstance(value, torch.Tensor | np.ndarray):
            self.direct.add(path)
        return self._own_leaf(path, value, filled=True)

    def _own_leaf(self, path: str, value: Any, *, filled: bool = False) -> Json:
        self.paths.append(path)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            return {"$tensor": self._take(path, value, own=True)}
        if isinstance(value, np.ndarray):
            return {"$array": self._take(path, tensor_of(path, value, filled=filled), own=True)}
        if isinstance(value, LEAVES):
            raise StateError(
                f"{path}: a part of a tensor that is spread over ranks belongs to all of them; "
                "track it without PerRank"
            )
        if isinstance(value, PerRank):
            return plain.encode(value.value, path, leaf=self._own_leaf)
        if (found := stateful_of(value)) is not None:
            return plain.encode(found.state_dict(), path, leaf=self._own_leaf)
        return plain.refuse(path, value)


def stored_names(tree: Json) -> Iterator[str]:
    """Yield the names of the tensors to which a saved tree refers."""
    if isinstance(tree, list):
        for item in tree:
            yield from stored_names(item)
    elif isinstance(tree, dict):
        if len(tree) == 1 and (tag := next(iter(tree))) in REFERENCES:
            yield tree[tag]
            return
        for item in tree.values():
            yield from stored_names(item)
