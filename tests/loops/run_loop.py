"""Run one loop of the library as a script: ``run_loop.py NAME FOLDER [--kill STEP BEAT]``.

With ``--kill`` the worker ``trainer/1`` ends itself by SIGKILL at that sign of life of that step,
once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
from pathlib import Path
from typing import Any

import torch

from holdfast.elastic.channel.base import WorkerPhase
from holdfast.elastic.channel.connecting import connect


def die_at(step: int, beat: int, marker: Path) -> None:
    """Make this worker die there, unless one has died before."""
    channel: Any = connect()
    lives, seen = channel.beat, []

    def dies(**shown: Any) -> None:
        if shown["step"] == step and shown["phase"] is WorkerPhase.COMPUTE:
            seen.append(step)
            if len(seen) == beat and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        lives(**shown)

    if channel.seat == "trainer/1":
        channel.beat = dies


def main() -> None:
    """Run the loop in its folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", type=int, nargs=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.chdir(args.folder)
    if args.kill:
        die_at(*args.kill, marker=args.folder / "died")
    importlib.import_module(f"library.{args.name}").port()


if __name__ == "__main__":
    main()
