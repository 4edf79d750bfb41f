"""The outcome that a training process of the benchmark writes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from holdfast.ckpt.types import learn

_DEVICES: Final = Path("/proc/net/dev")
_SENT_FIELD: Final = 8


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The steps after the first with their seconds, and the loss on held-out windows.

    ``sent`` and ``received`` are the bytes of this process in these steps: those of its line with
    the headers of frames if it has one, else those that the way itself counts. ``digest`` is that
    of the weights at the end, empty where they are not compared.
    """

    steps: int
    seconds: float
    parameters: int
    held_out: float
    sent: int
    received: int
    digest: str = ""


class LineBytes(NamedTuple):
    """Bytes that a line carried."""

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


class Stopwatch:
    """The seconds and the bytes of a line from the end of the first step on."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.began_s = time.monotonic()
        self._before = self._carried()

    def _carried(self) -> LineBytes:
        return LineBytes.by(self._device) if self._device else LineBytes(0, 0)

    def read(self) -> tuple[float, LineBytes]:
        """Return both."""
        seconds, now = time.monotonic() - self.began_s, self._carried()
        before = self._before
        return seconds, LineBytes(now.sent - before.sent, now.received - before.received)


learn(globals())
