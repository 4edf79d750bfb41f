"""Tensors of ``.pt`` files that are read box by box, whole ones and flat ones in parts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
from typing_extensions import Buffer

from holdfast.ckpt.convert.box_files import RawTensor
from holdfast.ckpt.convert.deepspeed.partitions import Parts
from holdfast.ckpt.convert.deepspeed.pickles import PickledState
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.local_boxes import check_tensor


class JoinedParts:
    """The bytes of flat tensors one after the other, read as if they were one file."""

    run_bytes = 4096

    def __init__(self, runs: Sequence[torch.Tensor]) -> None:
        self._runs = [
            memoryview(torch_dtypes.as_carrier(run).view(torch.uint8).numpy().data) for run in runs
        ]
        self._starts = [0, *accumulate(run.nbytes for run in self._runs)]
        self.nbytes = self._starts[-1]

    def read_into(self, buffers: Sequence[Buffer], at: int) -> int:
        """Fill ``buffers`` from byte ``at`` on; return the number of bytes."""
        done = 0
        for buffer in buffers:
            room = memoryview(buffer).cast("B")
            while room.nbytes and at < self.nbytes:
                number = bisect_right(self._starts, at) - 1
                first = at - self._starts[number]
                taken = self._runs[number][first : first + room.nbytes]
                room[: taken.nbytes] = taken
                room, at, done = room[taken.nbytes :], at + taken.nbytes, done + taken.nbytes
        return done

    def close(self) -> None:
        """Release the bytes."""
        self._runs.clear()


class MappedTensor:
    """A tensor that is read box by box; ``spec`` describes it."""

    def __init__(self, spec: TensorSpec, file: JoinedParts) -> None:
        self.spec = spec
        itemsize = torch_dtypes.BY_NAME[spec.dtype].itemsize
        self._raw = RawTensor(file, start=0, shape=spec.shape, itemsize=itemsize)

    def read(self, box: Box, *, origin: str) -> memoryview:
        """Return a box's elements."""
        return self._raw.read(box, origin=origin)


def whole_tensor(
    fqn: str, tensor: torch.Tensor, file: PickledState, *, shape: tuple[int, ...] | None = None
) -> MappedTensor:
    """Return a tensor of a file under the name ``fqn``, if need be in another shape.

    Raises ``StateError`` for a tensor that no format can hold, ``CorruptError`` for one that claims
    more bytes than its file has, or has another number of elements than ``shape``.
    """
    where = f"{file.path}: {fqn}"
    check_tensor(where, tensor)
    tensor = tensor.detach()
    if tensor.numel() * tensor.itemsize > file.file_bytes:
        raise file.damaged(f"{fqn} has more bytes than the file")
    if shape is not None and prod(shape) != tensor.numel():
        raise file.damaged(f"{fqn} has {tensor.numel()} elements, {list(shape)} are needed")
    spec = TensorSpec(
        fqn=fqn,
        dtype=torch_dtypes.NAME_OF[tensor.dtype],
        shape=tuple(tensor.shape) if shape is None else shape,
    )
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return MappedTensor(spec, JoinedParts([flat]))


def joined_tensor(
    fqn: str, parts: Parts, vectors: Sequence[torch.Tensor], *, shape: tuple[int, ...]
) -> MappedTensor:
    """Return the tensor whose ``parts`` lie in the flat vectors of the ranks."""
    dtype = torch_dtypes.NAME_OF[vectors[0].dtype]
    runs = [vectors[part.rank][part.start : part.start + part.count] for part in parts]
    return MappedTensor(TensorSpec(fqn=fqn, dtype=dtype, shape=shape), JoinedParts(runs))
