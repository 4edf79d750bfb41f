"""A device without a device: lanes whose streams run only when they are waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.snapshot.lanes import Mark
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.copying import resolved


class FakeStream:
    """Work in order, done as late as possible: when a caller waits for it.

    All streams share one lock, because they wait for each other.
    """

    _working = threading.RLock()

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self._done = 0

    def ask(self, work: Callable[[], object]) -> None:
        """Append ``work``."""
        self._work.append(work)

    def mark(self) -> FakeMark:
        """Mark the end of the work so far."""
        return FakeMark(self, len(self._work))

    def reach(self, point: int) -> None:
        """Do all work before ``point``."""
        with self._working:
            while self._done < point:
                self._work[self._done]()
                self._done += 1

    def drain(self) -> None:
        """Do all work."""
        self.reach(len(self._work))


@dataclass(frozen=True, slots=True)
class FakeMark:
    """A point in a fake stream."""

    stream: FakeStream
    point: int

    def synchronize(self) -> None:
        """Run the stream up to this point."""
        self.stream.reach(self.point)


@dataclass(eq=False, slots=True)
class FakeLane:
    """One device's side stream beside ``training``, to which the test adds its own work."""

    training: FakeStream = field(default_factory=FakeStream)
    side: FakeStream = field(default_factory=FakeStream)
    pinned: list[SlotFile] = field(default_factory=list)
    is_closed: bool = False

    def ready(self) -> Mark:
        """Mark the position of the training stream."""
        return self.training.mark()

    def look(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy in the training stream."""
        parts = [torch_dtypes.as_carrier(resolved(source)) for source in sources]
        room = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in parts]
        self.training.ask(lambda: [r.copy_(p) for r, p in zip(room, parts, strict=True)])
        return room

    def begin(self, after: Mark) -> None:
        """Make the side stream wait."""
        self.side.ask(after.synchronize)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Add a copy to the side stream."""
        self.side.ask(lambda: into.copy_(torch_dtypes.as_carrier(resolved(source))))

    def mark(self) -> Mark:
        """Mark the end of the side stream."""
        return self.side.mark()

    def hold(self, mark: Mark) -> None:
        """Make the training stream wait."""
        self.training.ask(mark.synchronize)

    def pin(self, slot: SlotFile) -> None:
        """Record the slot."""
        self.pinned.append(slot)

    def close(self) -> None:
        """Record the end."""
        self.is_closed = True


@dataclass(slots=True)
class FakeLanes:
    """Assigns tensors that ``is_there`` accepts to the device of ``lane``."""

    is_there: Callable[[torch.Tensor], bool]
    lane: FakeLane = field(default_factory=FakeLane)

    def of(self, tensor: torch.Tensor) -> FakeLane | None:
        """Return the lane of a tensor on the device."""
        return self.lane if self.is_there(tensor) else None

    def close(self) -> None:
        """Close the lane."""
        self.lane.close()
