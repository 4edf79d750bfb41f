"""Data sets that are hard on their readers, in a module that any process can import."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import torch
from loader_worlds import Numbers


class Noisy(Numbers):
    """Samples with the randomness of three generators in them."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.random()), torch.rand(()).item()


class Deadly(Numbers):
    """Ends the process that reads sample 20, each time or only while ``marker`` is not there."""

    def __init__(self, size: int, marker: Path | None) -> None:
        super().__init__(size)
        self.marker, self.home = marker, os.getpid()

    def __getitem__(self, index: int) -> int:
        if index == 20 and os.getpid() != self.home and not (self.marker and self.marker.exists()):
            if self.marker:
                self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Slow(Numbers):
    """Never gives sample 5."""

    def __getitem__(self, index: int) -> int:
        while index == 5:
            time.sleep(1)
        return index


class Broken(Numbers):
    """Gives no sample."""

    def __getitem__(self, index: int) -> int:
        raise LookupError(f"no sample {index}")


class Named(Numbers):
    """Samples that say which process read them, as tensors."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid(), os.getppid()])


LOCK = threading.Lock()


class Locking(Numbers):
    """Takes a lock for every sample, as logging does, and much else."""

    def __getitem__(self, index: int) -> int:
        with LOCK:
            return index


class Hanging:
    """Makes so many worker processes stand still in their start; each leaves a file ``stuck-``."""

    def __init__(self, folder: Path, *, times: int) -> None:
        self._folder = folder
        for turn in range(times):
            (folder / f"turn-{turn}").touch()

    def __call__(self, worker: int) -> None:
        for turn in self._folder.glob("turn-*"):
            try:
                turn.rename(self._folder / f"stuck-{os.getpid()}")
            except FileNotFoundError:
                continue
            while True:
                signal.pause()


class Noting:
    """Leaves a file for every worker process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, worker: int) -> None:
        (self._folder / str(worker)).touch()
