"""Short messages of all ranks of a large world, through a tree of circles.

A ring through N ranks takes 2 N hops and connects each rank with two; a tree takes a few hops, and
connects a rank only with its circles. So the loop's own short messages take the tree, and gradients
take gloo's ring. Only what has equal bits in any order is reduced here: integers, and largest
values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch.distributed import BroadcastOptions, GatherOptions, Work

from holdfast.ckpt.errors import PeerError
from holdfast.elastic.groups.waits import Joined

SHORT_BYTES: Final = 64 << 10
"""The largest tensor that takes the tree: a leader receives as much from each of its circle."""

_FRAME_BYTES: Final = 1 << 10
"""Bytes of a block that travel with its length; most messages are not longer."""

_LENGTH: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<QQ")  # a rank and the number of its bytes

_INTEGERS: Final = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_FLOATS: Final = frozenset({torch.float32, torch.float64})


class Circle(Protocol):
    """A connected group of few ranks, of which 0 leads."""

    def rank(self) -> int:
        """Return this rank's number in it."""

    def size(self) -> int:
        """Return the number of its ranks."""

    def start_own(
        self, name: str, *args: Any, joined: Joined | None = None, lazy: bool = False
    ) -> Work:
        """Start an operation of gloo's, by its name."""


def is_short(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the CPU and small enough for the tree."""
    return tensor.device.type == "cpu" and tensor.nbytes <= SHORT_BYTES


def adds(tensor: torch.Tensor) -> bool:
    """Return whether the tree can add up such tensors: short ones of integers."""
    return tensor.dtype in _INTEGERS and is_short(tensor)


def compares(tensor: torch.Tensor) -> bool:
    """Return whether the tree can find the largest elements of such tensors."""
    return (tensor.dtype in _INTEGERS or tensor.dtype in _FLOATS) and is_short(tensor)


class MessageTree:
    """One rank's place in the tree of many.

    ``path`` are its circles from the leaves on; it leads all but the last, and member 0 leads that
    too. This rank is number ``member`` of ``members``. ``join``, if given, counts a message of all
    ranks of the world. Every method is collective over all members, and raises
    ``GenerationOverError`` as soon as the generation is over.
    """

    def __init__(
        self,
        path: Sequence[Circle],
        *,
        member: int,
        members: int,
        join: Callable[[], Joined] | None = None,
    ) -> None:
        self._path, self._member, self._members = tuple(path), member, members
        self._join = join

    def sum_(self, tensor: torch.Tensor) -> None:
        """Add up all members' tensors, in place; see `adds`."""
        self._reduce(tensor, torch.Tensor.add_)

    def max_(self, tensor: torch.Tensor) -> None:
        """Take the largest of all members' elements, in place; a NaN is larger. See `compares`."""
        self._reduce(tensor, _largest_)

    def gather(self, data: bytes | bytearray) -> list[bytearray]:
        """Return every member's bytes, in the order of the members."""
        joined = self._joined()
        block = _HEAD.pack(self._member, len(data)) + bytes(data)
        for circle in self._path:
            block = _collect(circle, block, joined)
        for circle in reversed(self._path):
            block = _spread(circle, block, joined)
        return _unpacked(block, self._members)

    def meet(self) -> None:
        """Wait for every member."""
        self.max_(torch.zeros(1, dtype=torch.uint8))

    def _joined(self) -> Joined | None:
        return self._join() if self._join is not None else None

    def _reduce(
        self, tensor: torch.Tensor, take_: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> None:
        joined = self._joined()
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        for circle in self._path:
            for other in _gathered(circle, total, joined)[1:]:
                take_(total, other)
        for circle in reversed(self._path):
            _broadcast(circle, total, joined)
        tensor.detach().copy_(total)


def _largest_(total: torch.Tensor, other: torch.Tensor) -> None:
    torch.maximum(total, other, out=total)


def _gathered(circle: Circle, mine: torch.Tensor, joined: Joined | None) -> list[torch.Tensor]:
    """Return the circle's tensors at the leader, in order; nothing elsewhere."""
    options = GatherOptions()
    options.rootRank = 0
    leads = circle.rank() == 0
    parts = [torch.empty_like(mine) for _ in range(circle.size())] if leads else []
    circle.start_own("gather", [parts] if leads else [], [mine], options, joined=joined).wait()
    return parts


def _broadcast(circle: Circle, tensor: torch.Tensor, joined: Joined | None) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    circle.start_own("broadcast", [tensor], options, joined=joined).wait()


def _collect(circle: Circle, block: bytes, joined: Joined | None) -> bytes:
    """Return the blocks of the whole circle at the leader, one after the other."""
    frames = [bytes(each.numpy().data) for each in _gathered(circle, _frame(block), joined)]
    room = _FRAME_BYTES - _LENGTH.size
    if circle.rank():
        if len(block) > room:
            rest = _tensor(block[room:])
            circle.start_own("send", [rest], 0, 0, joined=joined, lazy=True).wait()
        return block
    rests: dict[int, tuple[torch.Tensor, Work]] = {}
    for index, frame in enumerate(frames):
        (length,) = _LENGTH.unpack_from(frame)
        if index and length > room:
            rest = torch.empty(length - room, dtype=torch.uint8)
            work = circle.start_own("recv", [rest], index, 0, joined=joined, lazy=True)
            rests[index] = rest, work
    parts = [block]
    for index, frame in enumerate(frames[1:], start=1):
        (length,) = _LENGTH.unpack_from(frame)
        parts.append(frame[_LENGTH.size : _LENGTH.size + min(length, room)])
        if index in rests:
            rest, work = rests[index]
            work.wait()
            parts.append(bytes(rest.numpy().data))
    return b"".join(parts)


def _spread(circle: Circle, block: bytes, joined: Joined | None) -> bytes:
    """Return the leader's block."""
    frame = _frame(block)
    _broadcast(circle, frame, joined)
    data = bytes(frame.numpy().data)
    (length,) = _LENGTH.unpack_from(data)
    room = _FRAME_BYTES - _LENGTH.size
    if length <= room:
        return data[_LENGTH.size : _LENGTH.size + length]
    rest = _tensor(block[room:]) if circle.rank() == 0 else torch.empty(length - room).byte()
    _broadcast(circle, rest, joined)
    return data[_LENGTH.size :] + bytes(rest.numpy().data)


def _frame(block: bytes) -> torch.Tensor:
    """Return the length of a block and its first bytes, as a tensor of fixed size."""
    data = _LENGTH.pack(len(block)) + block[: _FRAME_BYTES - _LENGTH.size]
    return _tensor(data.ljust(_FRAME_BYTES, b"\0"))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(block: bytes, members: int) -> list[bytearray]:
    """Return the bytes of each member. Raises ``PeerError`` if not every one spoke once."""
    found: dict[int, bytearray] = {}
    at = spoken = 0
    while at < len(block):
        member, size = _HEAD.unpack_from(block, at)
        at += _HEAD.size
        found[member] = bytearray(block[at : at + size])
        at += size
        spoken += 1
    if spoken != members or found.keys() != set(range(members)):
        raise PeerError(f"{spoken} messages came of {members} ranks: the ranks differ in theirs")
    return [found[member] for member in range(members)]
