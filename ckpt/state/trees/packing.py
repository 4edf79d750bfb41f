"""A value as bytes and back, for another process: it gets the same types and the same bits.

The bytes are a length (8 bytes, little-endian), JSON of this length with ``tree`` and ``tensors``,
and the elements of each tensor in C order. The tree is encoded like all plain values, see
`holdfast.ckpt.state.plain`, with these tags of its own:

=================================  =============================================
``{"$tensor": i}``                 the tensor with this number
``{"$array": i}``                  a NumPy array over it
``{"$ordered": [map, attributes]}``  an OrderedDict, such as a module's state_dict
=================================  =============================================

Subclasses and other objects would come back as something else: they are refused.
"""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn

from holdfast.ckpt.errors import CorruptError, StateError
from holdfast.ckpt.state import plain, torch_dtypes
from holdfast.ckpt.state.local_boxes import check_tensor
from holdfast.ckpt.state.trees.arrays import tensor_of
from holdfast.ckpt.types import Json

_LENGTH: Final = struct.Struct("<Q")
_PLAIN: Final = (bool, int, float, str, bytes, type(None))


class _TensorRecord(NamedTuple):
    """A packed tensor. ``strides`` are in elements; ``kind`` is ``tensor`` or ``parameter``."""

    dtype: str
    shape: list[int]
    strides: list[int]
    kind: str
    requires_grad: bool


def pack(value: Any, path: str) -> bytearray:
    """Return ``value`` as bytes: plain values, dense tensors, arrays, and containers of them.

    Tensors may be on any device. Raises ``StateError`` for anything else, naming it by its path,
    which begins with ``path``.
    """
    packer = _Packer()
    tree = packer.tree(value, path)
    head = json.dumps({"tree": tree, "tensors": packer.records}, allow_nan=False).encode()
    data = bytearray(_LENGTH.pack(len(head)) + head)
    for tensor in packer.tensors:
        full = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        data += torch_dtypes.as_carrier(full).reshape(-1).numpy().view(np.uint8).data
    return data


def unpack(data: bytearray) -> Any:
    """Return the value that `pack` was given, with its tensors on the CPU.

    Raises ``CorruptError`` for other bytes.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        at = _LENGTH.size + length
        head = json.loads(data[_LENGTH.size : at])
        tensors = []
        for record in head["tensors"]:
            tensors.append(tensor := _tensor(data, at, _TensorRecord(*record)))
            at += tensor.nbytes
        return _value(head["tree"], tensors)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        struct.error,
    ) as error:
        raise CorruptError(f"{len(data)} bytes are no packed value: {error}") from error


class _Packer:
    """Encodes one tree. ``tensors`` are those that it refers to, ``records`` what they are."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.records: list[_TensorRecord] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def tree(self, value: Any, path: str, *, depth: int = 0) -> Json:
        if depth > plain.MAX_DEPTH:
            raise StateError(f"{path}: nested deeper than {plain.MAX_DEPTH} levels")
        kind = type(value)
        if kind in _PLAIN or isinstance(value, np.generic):
            return _scalar(value, path)
        if kind in (torch.Tensor, nn.Parameter):
            return {"$tensor": self._number(value, path)}
        if kind is np.ndarray:
            return {"$array": self._number(tensor_of(path, value, filled=False), path)}
        if kind in (list, tuple):
            items = [self.tree(e, f"{path}[{i}]", depth=depth + 1) for i, e in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind not in (dict, OrderedDict):
            raise StateError(f"{path} is a {kind.__name__}")
        pairs = [
            [_key(key, path), self.tree(item, f"{path}[{key!r}]", depth=depth + 1)]
            for key, item in value.items()
        ]
        found: Json = {"$map": pairs}
        if kind is dict:
            return found
        return {"$ordered": [found, self.tree(vars(value), f"vars({path})", depth=depth + 1)]}

    def _number(self, tensor: torch.Tensor, path: str) -> int:
        """Take a tensor; one that is taken already keeps its number, as tied weights do."""
        check_tensor(path, tensor)
        record = _TensorRecord(
            dtype=torch_dtypes.NAME_OF[tensor.dtype],
            shape=list(tensor.shape),
            strides=_strides(tensor),
            kind="parameter" if isinstance(tensor, nn.Parameter) else "tensor",
            requires_grad=tensor.requires_grad,
        )
        place = tensor.data_ptr() if tensor.numel() else id(tensor)
        number = self._numbers.setdefault(
            (tensor.device, place, str(record), tensor.is_conj(), tensor.is_neg()),
            len(self.tensors),
        )
        if number == len(self.tensors):
            self.tensors.append(tensor.detach())
            self.records.append(record)
        return number


def _key(key: Any, path: str) -> Json:
    if type(key) not in _PLAIN:
        raise StateError(f"{path} has a key of type {type(key).__name__}")
    return _scalar(key, path)


def _scalar(value: Any, path: str) -> Json:
    if type(value) is str:
        return value  # any text: the head is ASCII, with escapes
    return plain.encode(value, path)


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides of a copy: the tensor's own, unless elements share memory in it."""
    spread = (
        n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if any(spread):
        return list(torch.empty(tensor.shape, device="meta").stride())
    return list(tensor.stride())


def _tensor(data: bytearray, at: int, record: _TensorRecord) -> torch.Tensor:
    dtype = torch_dtypes.BY_NAME[record.dtype]
    full = torch.empty(record.shape, dtype=dtype)
    if math.prod(record.shape):
        raw = torch.frombuffer(data, dtype=torch.uint8, count=full.nbytes, offset=at)
        torch_dtypes.as_carrier(full).view(-1).view(torch.uint8).copy_(raw)
    if list(full.stride()) != record.strides:
        dense, full = full, torch.empty_strided(record.shape, record.strides, dtype=dtype)
        torch_dtypes.as_carrier(full).copy_(torch_dtypes.as_carrier(dense))
    if record.kind == "parameter":
        return nn.Parameter(full, requires_grad=record.requires_grad)
    return full.requires_grad_(record.requires_grad)


def _value(tree: Json, tensors: list[torch.Tensor]) -> Any:
    def leaf(tag: str, payload: Any) -> Any:
        match tag:
            case "$tensor":
                return tensors[payload]
            case "$array":
                return tensors[payload].numpy()
            case "$ordered":
                items, attributes = (plain.decode(each, leaf=leaf) for each in payload)
                found = OrderedDict(items)
                vars(found).update(attributes)
                return found
        return plain.no_tags(tag, payload)

    return plain.decode(tree, leaf=leaf)
