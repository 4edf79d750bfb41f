"""Stops for a test's sidecars at points of a slot's life.

Python imports this at its start if this folder is on its path; `stop_points` beside the folder
explains its use. ``HOLDFAST_TEST_STOP_AT`` is ``POINT:N``, the Nth time that a slot reaches the
point; or it is the path of a file in which a test writes the point: the first process to reach it
removes the file and stops.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STOP_AT = os.environ.get("HOLDFAST_TEST_STOP_AT", "")


def stop_sidecar() -> None:
    """Tell the arena of a sidecar, once that is made, where to stop."""
    from holdfast.ckpt.sidecar.server import Sidecar

    make = Sidecar.__init__

    @functools.wraps(make)
    def wrapper(sidecar: Sidecar, *args: Any, **kwargs: Any) -> None:
        make(sidecar, *args, **kwargs)
        sidecar.core.arena.reach = stopper(_STOP_AT)

    Sidecar.__init__ = wrapper  # type: ignore[method-assign]


def stopper(stop_at: str) -> Callable[[str], None]:
    """Return what `Arena.reach` is to be."""
    if Path(stop_at).is_absolute():
        return functools.partial(stop_as_told, Path(stop_at))
    wanted, _, count = stop_at.partition(":")
    left = [wanted] * int(count)

    def reach(point: str) -> None:
        if point == wanted and left:
            left.pop()
            if not left:
                os.kill(os.getpid(), signal.SIGSTOP)

    return reach


def stop_as_told(file: Path, point: str) -> None:
    """Stop where ``file`` names this point; of several processes, the one that removes it."""
    with contextlib.suppress(FileNotFoundError):
        if file.read_text() == point:
            file.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)


if _STOP_AT and "holdfast.ckpt.sidecar" in sys.orig_argv:
    stop_sidecar()
