"""The identity of a data set: what is certain of it without reading a sample.

Every rank must have the whole data set, because each step is divided among the ranks by position.
The kind and the length are compared, and of torch's own data sets, tensors, arrays and lists the
first and the last contents. Objects of other classes are not looked into: their attributes may
differ rightly, such as a cache or a path.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from holdfast.ckpt.types import Json
from holdfast.elastic.data.loaders import Loader
from holdfast.elastic.groups.contents import BLOCK_BYTES, digest

_MOST_ROWS: Final = 64
_MOST_ITEMS: Final = 8
_MOST_INDICES: Final = 4096
_DEPTH: Final = 4
_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
_TENSORS: Final = frozenset({torch.Tensor, nn.Parameter})

DatasetIdentity: TypeAlias = list[Json]
"""The kind of a data set, its length (None: it has none), and a digest of contents."""


def identity_of(data: Any, *, contents: bool) -> DatasetIdentity:
    """Return the identity of what a pass gets; without ``contents`` the digest is 0."""
    if isinstance(data, Loader):
        data = data.dataset
    kind = type(data).__name__
    try:
        count = None if data is None else len(data)
    except TypeError:  # a stream
        count = None
    return [kind, count, _digest(data, 0) if contents else 0]


def difference_of(found: Sequence[DatasetIdentity]) -> str:
    """Return how the ranks' data sets differ, by rank; '' if they do not."""
    first = found[0]
    for rank, other in enumerate(found):
        if other[:2] != first[:2]:
            return f"rank 0 has {_shown(first)}, rank {rank} {_shown(other)}"
        if other != first:
            return f"rank 0 and rank {rank} have {_shown(first)} each, with other contents"
    return ""


def _shown(identity: DatasetIdentity) -> str:
    kind, count, _ = identity
    return f"a {kind} of {count} samples" if count is not None else f"a {kind}"


def _digest(data: Any, depth: int) -> int:
    kind = type(data)
    if kind in _TENSORS:
        return _of_tensor(data)
    if kind is np.ndarray and data.dtype.kind in "biufcSU":
        return _of_array(data)
    if kind in _PLAIN or kind is range:
        return zlib.crc32(repr(data).encode())
    parts = _parts_of(data) if depth < _DEPTH else ()
    found = zlib.crc32(kind.__qualname__.encode())
    for part in parts:
        found = zlib.crc32(_digest(part, depth + 1).to_bytes(4, "little"), found)
    return found


def _parts_of(data: Any) -> Iterable[Any]:
    """Return what a container or one of torch's data sets consists of."""
    kind = type(data)
    if kind in (list, tuple):
        most = _MOST_INDICES if data and type(data[0]) is int else _MOST_ITEMS
        return [len(data), *data[:most], *data[-most:]]
    if kind is dict:
        return [each for item in list(data.items())[:_MOST_ITEMS] for each in item]
    if issubclass(kind, TensorDataset):
        return list(data.tensors)
    if issubclass(kind, Subset):
        return [data.dataset, data.indices]
    if issubclass(kind, ConcatDataset | StackDataset):
        return [data.datasets]
    return ()


def _of_tensor(tensor: torch.Tensor) -> int:
    shape = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return shape
    rows = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
    row_bytes = max(1, rows[0].numel() * rows.itemsize)
    count = max(1, min(_MOST_ROWS, BLOCK_BYTES // row_bytes))
    for ends in (rows[:count], rows[-count:]):
        part = ends
        while part.numel() * part.itemsize > BLOCK_BYTES and part.dim() > 1:
            part = part[0]  # rows are large: a part of one must do
        found = digest(part.contiguous(), range(1))
        shape = zlib.crc32(found.to_bytes(4, "little"), shape)
    return shape


def _of_array(array: np.ndarray[Any, Any]) -> int:
    found = zlib.crc32(f"{array.dtype.str} {array.shape}".encode())
    if not array.size:
        return found
    rows = array if array.ndim else array.reshape(1)
    count = max(1, min(_MOST_ROWS, BLOCK_BYTES // max(1, rows[0].nbytes)))
    for part in (rows[:count], rows[-count:]):
        found = zlib.crc32(np.ascontiguousarray(part).tobytes()[:BLOCK_BYTES], found)
    return found
