"""Transfer of saved bytes into live tensors, which a source fills as arrays.

A CPU tensor is filled in place. A tensor on another device is filled through host memory, a bounded
amount at a time. If several elements share memory, as after ``expand``, those in one place must
have been saved with one value: their bytes are read and compared before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import torch

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.geometry.reshard import Saved, plan
from holdfast.ckpt.geometry.scatter import Array, ByChunk, grouped
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.local_boxes import LocalBox, overlaps_itself

Targets: TypeAlias = Mapping[str, tuple[TensorSpec, Sequence[tuple[Box, torch.Tensor]]]]
"""Per saved name: its spec, and each wanted box with the live tensor (of its shape) to fill."""

_STAGED_BYTES: Final = 256 << 20
_ALIGN: Final = 64
_PLAIN: Final = frozenset((torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8))
"""Dtypes of numpy too."""


class LandingSource(Protocol):
    """The part of a shard source that this module needs."""

    def scatter(self, deliveries: ByChunk) -> int:
        """Read regions of chunks into their destinations, verified; return the bytes read."""


def fill(source: LandingSource, saved: Saved, targets: Targets) -> int:
    """Fill live tensors with the saved bytes of their boxes; return the bytes read.

    Raises ``CorruptError`` if bytes are damaged or missing; tensors may be half filled then.
    """
    return sum(_fill(source, saved, batch) for batch in _batches(targets))


def overlapping(targets: Targets) -> list[list[str]]:
    """Return groups of saved names whose live tensors may share memory, as views of one do."""
    spans: dict[torch.device, list[tuple[int, int, str]]] = {}
    for fqn, (_, parts) in targets.items():
        if tensors := [tensor for _, tensor in parts if tensor.numel()]:
            spans.setdefault(tensors[0].device, []).append((*_span(tensors), fqn))
    groups: list[list[str]] = []
    for found in spans.values():
        reach = 0
        for start, end, fqn in sorted(found):
            if start < reach:
                groups[-1].append(fqn)
            else:
                groups.append([fqn])
            reach = max(reach, end)
    return [group for group in groups if len(group) > 1]


def contradict(source: LandingSource, saved: Saved, group: Targets) -> bool:
    """Say whether live tensors that share memory cannot all have their saved contents.

    All of it is tried in a copy of their memory; nothing live changes.
    """
    rooms = {
        fqn: (spec, [(box, torch.empty(box.shape, dtype=live.dtype)) for box, live in parts])
        for fqn, (spec, parts) in group.items()
    }
    fill(source, saved, rooms)
    live = [tensor for _, parts in group.values() for _, tensor in parts]
    read = [tensor for _, parts in rooms.values() for _, tensor in parts]
    first, end = _span(live)
    first -= first % _ALIGN
    copy = torch.empty(end - first, dtype=torch.uint8).untyped_storage()
    views = [
        torch.empty(0, dtype=tensor.dtype).set_(
            copy,
            (tensor.data_ptr() - first) // tensor.itemsize,
            tensor.shape,
            tensor.stride(),
        )
        for tensor in live
    ]
    carriers = [torch_dtypes.as_carrier(view) for view in views]
    wanted = [torch_dtypes.as_carrier(tensor) for tensor in read]
    for view, room in zip(carriers, wanted, strict=True):
        view.copy_(room)
    return not all(map(torch.equal, map(_raw, carriers), map(_raw, wanted)))


def _raw(carrier: torch.Tensor) -> torch.Tensor:
    """Return the bytes: no NaN is equal to itself."""
    return carrier.contiguous().reshape(-1).view(torch.uint8)


def _span(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return the addresses of the first byte of tensors, and of that behind their last one."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return (first := tensors[0].data_ptr()), first + tensors[0].nbytes
    starts = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    ends = [tensor.data_ptr() + _reach(tensor) for tensor in tensors if tensor.numel()]
    return min(starts), max(ends)


def _reach(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((extent - 1) * stride for extent, stride in steps)) * tensor.itemsize


def _fill(source: LandingSource, saved: Saved, targets: Targets) -> int:
    want: dict[str, tuple[TensorSpec, tuple[Box, ...]]] = {}
    arrays: dict[str, list[Array]] = {}
    staged: list[tuple[torch.Tensor, torch.Tensor]] = []
    for fqn, (spec, parts) in targets.items():
        want[fqn] = (spec, tuple([box for box, _ in parts]))
        arrays[fqn] = []
        for _, tensor in parts:
            room = tensor if tensor.is_cpu else _room(tensor)
            if room is not tensor:
                staged.append((tensor, room))
            arrays[fqn].append(_array(room))
    read = source.scatter(grouped(plan(saved, want, strict=False), arrays))
    with torch.no_grad():
        for tensor, room in staged:
            tensor.copy_(room)
    return read


def _room(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory to fill in the place of a device's tensor (pinned for CUDA)."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _array(room: torch.Tensor) -> Array:
    """Return host memory as an array of elements of its width."""
    if room.dtype in _PLAIN:
        return room.numpy()
    return torch_dtypes.as_carrier(room).numpy()


def _batches(targets: Targets) -> Iterator[Targets]:
    """Yield all CPU tensors as one batch, then the others in batches of bounded size."""
    here = {
        fqn: wanted
        for fqn, wanted in targets.items()
        if all(tensor.is_cpu for _, tensor in wanted[1])
    }
    if here:
        yield here
    batch: dict[str, tuple[TensorSpec, Sequence[tuple[Box, torch.Tensor]]]] = {}
    size = 0
    for fqn, wanted in targets.items():
        if fqn in here:
            continue
        nbytes = sum(tensor.nbytes for _, tensor in wanted[1])
        if batch and size + nbytes > _STAGED_BYTES:
            yield batch
            batch, size = {}, 0
        batch[fqn] = wanted
        size += nbytes
    if batch:
        yield batch


@dataclass(slots=True, kw_only=True)
class Expanded:
    """A box of the live tensor ``name``: ``places`` is a view of each place in its memory, once.

    ``room`` receives the box as it was saved.
    """

    name: str
    box: Box
    places: torch.Tensor
    room: torch.Tensor

    @classmethod
    def of(cls, name: str, local_box: LocalBox) -> Expanded:
        """Return the room for ``local_box``.

        Raises ``StateError`` if its elements share memory in another way than by dims of stride 0.
        """
        places = local_box.local
        for dim, stride in enumerate(local_box.local.stride()):
            if stride == 0:
                places = places.narrow(dim, 0, 1)
        if overlaps_itself(places):
            raise StateError(
                f"{name}: several of its elements share memory, so it cannot be filled in place; "
                "put a copy into the state, such as its clone()"
            )
        room = torch.empty(local_box.box.shape, dtype=places.dtype)
        return cls(name=name, box=local_box.box, places=places, room=room)

    def is_consistent(self) -> bool:
        """Say whether the elements of ``room`` that share a place have equal bits."""
        room = torch_dtypes.as_carrier(self.room)
        first = room[tuple(slice(n) for n in self.places.shape)]
        raw = [each.contiguous().view(torch.uint8) for each in (room, first.expand_as(room))]
        return torch.equal(*raw)

    def land(self) -> int:
        """Copy ``room`` into the live memory; return the number of bytes."""
        first = self.room[tuple(slice(n) for n in self.places.shape)]
        with torch.no_grad():
            torch_dtypes.as_carrier(self.places).copy_(torch_dtypes.as_carrier(first))
        return self.room.nbytes


def read_expanded(
    source: LandingSource,
    saved: Saved,
    specs: Mapping[str, TensorSpec],
    expanded: Mapping[str, Sequence[Expanded]],
) -> list[str]:
    """Read the boxes of all; return in words which cannot be filled, because values differ."""
    targets = {
        fqn: (specs[fqn], [(each.box, each.room) for each in boxes])
        for fqn, boxes in expanded.items()
    }
    fill(source, saved, targets)
    return [
        f"differs: {each.name} has elements that share memory (expand() makes such tensors), and "
        "they were saved with different values; put a copy into the state, such as its clone()"
        for boxes in expanded.values()
        for each in boxes
        if not each.is_consistent()
    ]
