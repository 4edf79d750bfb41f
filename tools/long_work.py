"""The progress of long work on bytes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from holdfast.elastic.channel.unwatched import EVENTS_ENV
from holdfast.elastic.events import WorkProgressed
from holdfast.elastic.events.log import EventWriter
from holdfast.tools.printing import say
from holdfast.tools.terminal import SafeConsole, readable

EVERY_S: Final = 10.0
"""Seconds between two lines, where stderr is no terminal."""


class LongWork(Progress):
    """The progress of work on bytes with its rate and the time that is left, on stderr.

    Enter it as a context, call ``task = work.add_task("reading", total=nbytes)``, then
    ``work.advance(task, nbytes)`` from any thread. A bar on a terminal disappears at the end;
    elsewhere there is a line every ``every_s`` seconds, none for work that is done sooner. ``kept``
    says, when the work is interrupted, what stays and how to go on. The file that HOLDFAST_EVENTS
    names gets the same as events `WorkProgressed`.
    """

    def __init__(
        self, kept: str, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        shown = SafeConsole(stderr=True)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=shown,
            transient=True,
            disable=not shown.is_terminal,
            get_time=clock,
        )
        self._kept, self._every_s, self._clock = kept, every_s, clock
        self._told_s = clock()
        path = os.environ.get(EVENTS_ENV)
        self._events = EventWriter(Path(path), node="") if path else None

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Count more bytes as done."""
        super().advance(task_id, advance)
        with self._lock:
            if self._clock() - self._told_s < self._every_s:
                return
            self._told_s = self._clock()
            task = self._tasks[task_id]
            event, line = event_of(task), line_of(task)
        self._write(event)
        if self.disable:
            say(line, stderr=True)

    def _write(self, event: WorkProgressed) -> None:
        if self._events:
            self._events.write(event, source="command")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """Remove the bar; of an interrupt, say what is kept."""
        super().__exit__(exc_type, exc_val, exc_tb)
        is_interrupt = exc_type is not None and issubclass(exc_type, KeyboardInterrupt)
        ended = "interrupted" if is_interrupt else "failed" if exc_type else "done"
        for task in self.tasks:
            self._write(event_of(task, ended=ended))
        if self._events:
            self._events.close()
        if is_interrupt:
            done = "; ".join(line_of(task) for task in self.tasks)
            say(f"stopped at {done}. {self._kept}" if done else self._kept, stderr=True)


def event_of(task: Task, *, ended: str = "") -> WorkProgressed:
    """Return a task's progress as an event."""
    return WorkProgressed(
        work=task.description,
        bytes=int(task.completed),
        total_bytes=None if task.total is None else int(task.total),
        bytes_per_s=task.speed,
        left_s=None if task.time_remaining is None else float(task.time_remaining),
        ended=ended,
    )


def line_of(task: Task) -> str:
    """Return a task's progress as one line."""
    parts = [f"{task.description}: {readable(task.completed)}"]
    if task.total is not None:
        parts[0] += f" of {readable(task.total)} ({task.percentage:.0f} %)"
    if task.speed:
        parts.append(f"{readable(task.speed)}/s")
    if task.time_remaining and not task.finished:
        minutes, seconds = divmod(int(task.time_remaining), 60)
        parts.append(f"{minutes}:{seconds:02} left")
    return ", ".join(parts)
