"""Run a command of Holdfast whose long work says each advance, and stands still at the first.

It goes on when an interrupt arrives, which it raises as the interpreter does.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from rich.progress import TaskID

from holdfast.tools import cli
from holdfast.tools.long_work import LongWork, line_of

interrupted = threading.Event()


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    interrupted.set()
    raise KeyboardInterrupt


class SlowWork(LongWork):
    """Work that stands still after its first bytes."""

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        print("advanced", line_of(self.tasks[0]), flush=True)
        while not interrupted.wait(0.05):
            pass


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupt)
    for name in ("convert", "reshard", "verify", "diff"):
        module = cli.load(name)
        vars(module)["LongWork"] = SlowWork
    sys.exit(cli.main())
