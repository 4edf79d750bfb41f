"""DLRover's Flash Checkpoint as a peer, where it is installed: ``pip install dlrover``.

Its saver is a process of its own; the trainer copies into shared memory and waits for the copy.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

_MODULE = "dlrover.trainer.torch.flash_checkpoint.ddp"


def is_installed() -> bool:
    """Return whether it can be imported."""
    return importlib.util.find_spec("dlrover") is not None


class Flash:
    """Saves a rank's tensors; a process group must be there."""

    def __init__(self, directory: Path) -> None:
        logging.getLogger("dlrover").setLevel(logging.ERROR)
        module = importlib.import_module(_MODULE)
        ranks = dist.get_world_size()
        self._kinds, self._step = module.StorageType, 0
        self._checkpointer = module.DdpCheckpointer(
            str(directory), local_shard_num=ranks, global_shard_num=ranks
        )

    def to_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Save to memory; returns when the copy is made."""
        self._step += 1  # a step that is not newer is not copied
        self._checkpointer.save_checkpoint(
            self._step, dict(tensors), storage_type=self._kinds.MEMORY
        )

    def close(self) -> None:
        """Let go of the shared memory."""
        self._checkpointer._engine.close()
