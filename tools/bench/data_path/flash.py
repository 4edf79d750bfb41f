"""DLRover's Flash Checkpoint as a way of saving, if it is installed.

It copies the state into shared memory while training waits. On request, a process beside the first
rank writes it from there to disk.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch

_TRACKER: Final = "dlrover_latest.txt"


def is_installed() -> bool:
    """Say whether DLRover is installed."""
    return importlib.util.find_spec("dlrover") is not None


@dataclass(frozen=True, slots=True)
class _Shared:
    """Sockets and memory of a process that both ways of saving share: each exists only once."""

    checkpointer: Any
    kinds: Any
    steps: Iterator[int]


@functools.cache
def _shared(directory: Path, rank: int, world_size: int) -> _Shared:
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": f"bench-{sha256(str(directory).encode()).hexdigest()[:12]}",
    }
    module = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
    logging.disable(logging.INFO)  # it logs every call
    directory.mkdir(parents=True, exist_ok=True)
    made = module.DdpCheckpointer(
        str(directory), local_shard_num=world_size, global_shard_num=world_size
    )
    return _Shared(made, module.StorageType, itertools.count(1))


class Flash:
    """Saves to memory; with ``persist`` to disk too, and is done when the disk copy is complete."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        directory: Path,
        *,
        seat: tuple[int, int],
        persist: bool,
    ) -> None:
        self._tensors, self._directory, self._persist = dict(tensors), directory, persist
        self._shared = _shared(directory, *seat)
        self._step = 0

    def save(self, step: int) -> None:
        """Copy to shared memory; steps are numbered here, because both ways share one memory."""
        del step
        self._step = next(self._shared.steps)
        kind = self._shared.kinds.DISK if self._persist else self._shared.kinds.MEMORY
        self._shared.checkpointer.save_checkpoint(self._step, self._tensors, storage_type=kind)

    def fence(self) -> None:
        """Return at once: ``save`` returns only after everything is copied."""

    def is_done(self) -> bool:
        """Say whether the last save has reached its destination."""
        if not self._persist or not self._step:
            return True
        try:
            return int((self._directory / _TRACKER).read_text() or 0) >= self._step
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Remove DLRover's memory and files."""
        self._shared.checkpointer._engine._shm_handler.unlink()
        shutil.rmtree(self._directory, ignore_errors=True)
