"""A device without a device: lanes whose streams run only when they are waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.snapshot.lanes import Mark
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.copying import resolved


class FakeStream:
    """Work in order, done as late as it may be: when somebody waits for it.

    One lock for all streams, because they wait for each other.
    """

    _working = threading.RLock()

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self._done = 0

    def ask(self, work: Callable[[], object]) -> None:
        """Put ``work`` behind what was asked for before."""
        self._work.append(work)

    def mark(self) -> FakeMark:
        """Mark the end of what was asked for so far."""
        return FakeMark(self, len(self._work))

    def reach(self, point: int) -> None:
        """Do all that was asked for before ``point``."""
        with self._working:
            while self._done < point:
                self._work[self._done]()
                self._done += 1

    def drain(self) -> None:
        """Do all that was asked for."""
        self.reach(len(self._work))


@dataclass(frozen=True, slots=True)
class FakeMark:
    """A point in a fake stream."""

    stream: FakeStream
    point: int

    def synchronize(self) -> None:
        """Have the stream come past it."""
        self.stream.reach(self.point)


@dataclass(eq=False, slots=True)
class FakeLane:
    """One device's side stream beside ``training``, which the test asks for its own work."""

    training: FakeStream = field(default_factory=FakeStream)
    side: FakeStream = field(default_factory=FakeStream)
    pinned: list[SlotFile] = field(default_factory=list)
    is_closed: bool = False

    def ready(self) -> Mark:
        """Mark where the training stream is."""
        return self.training.mark()

    def begin(self, after: Mark) -> None:
        """Let the side stream wait."""
        self.side.ask(after.synchronize)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Ask the side stream for a copy."""
        self.side.ask(lambda: into.copy_(torch_dtypes.as_carrier(resolved(source))))

    def mark(self) -> Mark:
        """Mark the end of the side stream."""
        return self.side.mark()

    def hold(self, mark: Mark) -> None:
        """Let the training stream wait."""
        self.training.ask(mark.synchronize)

    def pin(self, slot: SlotFile) -> None:
        """Note the slot."""
        self.pinned.append(slot)

    def close(self) -> None:
        """Note the end."""
        self.is_closed = True


@dataclass(slots=True)
class FakeLanes:
    """Says that parameters, and what has their shape, lie on the device of ``lane``."""

    is_there: Callable[[torch.Tensor], bool]
    lane: FakeLane = field(default_factory=FakeLane)

    def of(self, tensor: torch.Tensor) -> FakeLane | None:
        """Return the lane for what is there."""
        return self.lane if self.is_there(tensor) else None

    def close(self) -> None:
        """Close the lane."""
        self.lane.close()
