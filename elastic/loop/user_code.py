"""The line of the user's script that called into Holdfast, for messages."""

from __future__ import annotations

import functools
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Final

import holdfast

_PACKAGES: Final = ("site-packages", "dist-packages")


@functools.cache
def _foreign() -> tuple[str, ...]:
    """Return the folders whose code is not the user's."""
    paths = sysconfig.get_paths()
    torch = find_spec("torch")  # not imported: processes without it ask too
    torchs = set(torch.submodule_search_locations or ()) if torch else set()
    folders = {paths["stdlib"], paths["platstdlib"]} | torchs | set(holdfast.__path__)
    return tuple(f"{folder}/" for folder in folders)


@functools.cache
def is_users(file: str) -> bool:
    """Return whether the code of ``file`` is the user's: not torch's, Python's or Holdfast's."""
    if file.startswith("<") or any(f"/{name}/" in file for name in _PACKAGES):
        return False
    return not file.startswith(_foreign())


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame of the user's code, from ``frame`` (default: here) outwards."""
    frame = frame or sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType | None) -> str:
    """Return a frame's line as ``train.py:41``; ``the script`` if there is none."""
    if frame is None:
        return "the script"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def user_line() -> str:
    """Return the user's line that is being executed, as ``train.py:41``."""
    return line_of(user_frame(sys._getframe(1)))
