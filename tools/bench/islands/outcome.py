"""The outcome that a training process of the benchmark writes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from holdfast.ckpt.types import learn

_DEVICES: Final = Path("/proc/net/dev")
_SENT_FIELD: Final = 8


class LineBytes(NamedTuple):
    """Bytes in both directions."""

    sent: int
    received: int

    @classmethod
    def by(cls, device: str) -> Self:
        """Return the bytes that a network device of this process's namespace carried so far."""
        for line in _DEVICES.read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == device:
                fields = [int(each) for each in counts.split()]
                return cls(fields[_SENT_FIELD], fields[0])
        raise ValueError(f"no network device {device!r}")


class Window(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The steps that are measured: from the end of the first step's work to that of the last's.

    Times are those of the wall clock. ``line`` are the bytes that the process's line carried, with
    the headers of frames; None without one.
    """

    steps: int
    began_s: float
    ended_s: float
    line: LineBytes | None

    @property
    def seconds(self) -> float:
        """The time of the steps."""
        return self.ended_s - self.began_s


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The window, the loss on held-out text at the end, and the bytes of gradients or payloads.

    ``waited_s`` are the seconds of the window in which an island waited for merges. ``digest`` is
    that of the weights at the end, empty where they are not compared. ``curve`` has the losses on
    the way that were asked for.
    """

    window: Window
    parameters: int
    held_out: float
    content: LineBytes = LineBytes(0, 0)
    waited_s: float = 0.0
    digest: str = ""
    curve: tuple[float, ...] = ()


class WindowClock:
    """Measures a window of steps, from the moment when it is made."""

    def __init__(self, device: str) -> None:
        self._device, self._began_s = device, time.time()
        self._before = self._carried()

    def _carried(self) -> LineBytes | None:
        return LineBytes.by(self._device) if self._device else None

    def window(self, steps: int) -> Window:
        """Return the window that ends now."""
        ended_s, now, before = time.time(), self._carried(), self._before
        line = None
        if now is not None and before is not None:
            line = LineBytes(now.sent - before.sent, now.received - before.received)
        return Window(steps=steps, began_s=self._began_s, ended_s=ended_s, line=line)


learn(globals())
