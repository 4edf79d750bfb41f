"""Follows a run directory: reads its events as they appear, and asks its nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from holdfast.ckpt.errors import HoldfastError, NotFoundError
from holdfast.elastic.events.log import EVENTS_PATTERN, FreshLines
from holdfast.elastic.events.wire import EventFormatError, decode_line
from holdfast.tools.live.asking import ask
from holdfast.tools.live.fold import Fold
from holdfast.tools.live.membership import held_off
from holdfast.tools.live.view import RunView
from holdfast.tools.show.node_status import NodeStatus

_AT_ONCE_BYTES: Final = 8 << 20
"""Bytes of all event files that one call reads at most, about."""

_WAITING: Final = ("spare", "held off")
_LEAST_BYTES: Final = 64 << 10


class Follower:
    """Reads a run as it goes, writes nothing there, and takes no part in it.

    `read` and `ask` may be called from two threads, each from one.

    Raises ``NotFoundError`` if there is no such directory, or no events of a run in it.
    """

    def __init__(self, run_dir: Path, *, now: Callable[[], float] = time.time) -> None:
        if not run_dir.is_dir():
            raise NotFoundError(
                f"{run_dir}: no such directory; give the one that `holdfast run --run-dir` got"
            )
        files = len(list(run_dir.glob(EVENTS_PATTERN)))
        if not files:
            raise NotFoundError(
                f"{run_dir}: no run has written events here; give the directory that "
                "`holdfast run --run-dir` got"
            )
        self.run_dir, self._now = run_dir, now
        self.fold = Fold()
        self.damaged = 0
        self.statuses: Mapping[str, NodeStatus] = {}
        self.silence = ""
        self._held_off: Mapping[str, str] = {}
        self._waiting: tuple[str, ...] = ()
        most_bytes = max(_AT_ONCE_BYTES // files, _LEAST_BYTES)
        self._lines = FreshLines(run_dir, pattern=EVENTS_PATTERN, most_bytes=most_bytes)

    def read(self) -> int:
        """Take over the events that appeared, up to a bound; return how many there were."""
        count = 0
        for _, line in self._lines.new():
            try:
                events = decode_line(line)
            except EventFormatError:
                self.damaged += 1
                continue
            self.fold.apply(events)
            count += len(events)
        return count

    def ask(self) -> None:
        """Ask the nodes for their status; ``silence`` says why there is no answer at all."""
        try:
            self.statuses, self.silence = {node.node: node for node in ask(self.run_dir)}, ""
        except (HoldfastError, OSError, ValueError) as error:
            self.statuses, self.silence = {}, str(error)
        self._held_off = held_off(self.run_dir, self._waiting) if self.statuses else {}

    def view(self) -> RunView:
        """Return the run as it is now."""
        view = self.fold.view(
            now_s=self._now(),
            statuses=self.statuses,
            held_off=self._held_off,
            damaged=self.damaged,
        )
        self._waiting = tuple(node.node for node in view.nodes if node.state in _WAITING)
        return view
