"""Tensors that wrap others, as quantised weights do: each part is captured under a name of its own.

A subclass with ``__tensor_flatten__`` names the attributes that hold its parts: in torchao's those
are integers and their scales. A restore fills the parts in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.types import Json

_PLAIN: Final = (bool, int, float, str, torch.dtype, tuple, list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrappedTensor:
    """A tensor that wraps others: its ``parts`` by attribute, and what it knows beside them.

    The ``description`` has the class and the plain values among its metadata, such as a block size.
    """

    tensor: torch.Tensor
    parts: Mapping[str, torch.Tensor]
    description: Json


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the tensors that a tensor wraps, None for one that wraps none."""
    kind = type(tensor)
    if kind in (torch.Tensor, nn.Parameter) or isinstance(tensor, DTensor):
        return None
    if not hasattr(kind, "__tensor_flatten__"):
        return None
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [getattr(tensor, name) for name in names]


def wrapped_of(fqn: str, tensor: torch.Tensor) -> WrappedTensor | None:
    """Return the parts of a tensor that wraps others, None for any other tensor.

    Raises ``StateError`` for one that is trained: the state of its optimizer has another layout.
    """
    if (parts := parts_of(tensor)) is None:
        return None
    kind = type(tensor)
    if tensor.requires_grad:
        raise StateError(
            f"{fqn}: tensor subclass {kind.__name__} cannot be captured while it is trained; "
            "freeze it by requires_grad_(False), or keep the plain tensors it is made of"
        )
    names, metadata = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return WrappedTensor(
        tensor=tensor,
        parts=dict(zip(names, parts, strict=True)),
        description={"kind": f"{kind.__module__}.{kind.__qualname__}", **_plain(metadata)},
    )


def _plain(metadata: Any) -> dict[str, Json]:
    if not isinstance(metadata, Mapping):
        metadata = dict(enumerate(metadata)) if isinstance(metadata, tuple | list) else {}
    return {str(key): str(value) for key, value in metadata.items() if isinstance(value, _PLAIN)}
