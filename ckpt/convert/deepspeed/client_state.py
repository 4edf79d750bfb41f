"""Client state of DeepSpeed's checkpoints: nested containers as named tensors and values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.ckpt.convert.deepspeed.mapped import MappedTensor, whole_tensor
from holdfast.ckpt.convert.deepspeed.pickles import PickledState
from holdfast.ckpt.errors import StateError
from holdfast.ckpt.state import plain
from holdfast.ckpt.types import Json


def take_client(
    name: str, item: object, file: PickledState
) -> tuple[list[MappedTensor], dict[str, Json]]:
    """Return the tensors and the plain values of one entry.

    An entry without tensors is one value. Containers of tensors become dotted names. Raises
    ``StateError`` for what is neither.
    """
    tensors: list[MappedTensor] = []
    values: dict[str, Json] = {}
    _walk(name, item, file, tensors=tensors, values=values, depth=0)
    return tensors, values


def _walk(
    name: str,
    item: object,
    file: PickledState,
    *,
    tensors: list[MappedTensor],
    values: dict[str, Json],
    depth: int,
) -> None:
    if depth > plain.MAX_DEPTH:
        raise StateError(f"{file.path}: {name}: nested deeper than {plain.MAX_DEPTH}; flatten it")
    if isinstance(item, torch.Tensor):
        tensors.append(whole_tensor(name, item, file))
        return
    if not _holds_tensors(item, depth):
        values[name] = plain.encode(item, f"{file.path}: {name}")
        return
    assert isinstance(item, Mapping | list | tuple)
    entries = item.items() if isinstance(item, Mapping) else enumerate(item)
    for key, entry in entries:
        if not isinstance(key, str | int) or key == "":
            raise StateError(
                f"{file.path}: {name}: key {key!r} is not a non-empty string or an integer; "
                "rename it"
            )
        _walk(f"{name}.{key}", entry, file, tensors=tensors, values=values, depth=depth + 1)


def _holds_tensors(item: object, depth: int) -> bool:
    if isinstance(item, torch.Tensor):
        return True
    if depth > plain.MAX_DEPTH or not isinstance(item, Mapping | list | tuple):
        return False
    entries = item.values() if isinstance(item, Mapping) else item
    return any(_holds_tensors(entry, depth + 1) for entry in entries)
