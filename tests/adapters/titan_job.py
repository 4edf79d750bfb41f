"""One process of a run of torchtitan's trainer on CPUs; its argument is a JSON object.

``arguments``: torchtitan's command line. ``kill``: the rank that a SIGKILL ends, and where: when it
writes its part of a step (``write``), or begins a step (``step``). ``copy``: load the step of
``--checkpoint.load_step`` and save it in that folder, without training.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import titan_on_cpu
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torchtitan.components.checkpointer import AsyncMode
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

from holdfast.adapters.dcp import HoldfastWriter


def trainer_of(arguments: list[str]) -> Any:
    """Return torchtitan's trainer for its command line."""
    sys.path.insert(0, str(Path.cwd()))  # as `python -m torchtitan.train` has it
    torch.set_num_threads(1)
    init_logger()
    trainer = titan_on_cpu.for_cpu(ConfigManager().parse_args(arguments)).build()
    manager = trainer.checkpointer
    if manager.enable and manager.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
        # torchtitan's own stager asks for an accelerator; this one stages as it does, without pins
        manager.stager = DefaultStager(StagingOptions(False, True, True, False))
    return trainer


def kill_at(trainer: Any, *, step: int, where: str) -> None:
    """Let this process die by SIGKILL in a step, and those that it started, as with its machine."""

    def die() -> None:
        for child in multiprocessing.active_children():  # torch's, for saves with pinned memory
            child.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "step":
        inner = trainer.train_step

        def train_step(data: Any) -> None:
            if trainer.step == step:
                die()
            inner(data)

        trainer.train_step = train_step
        return
    write_data = HoldfastWriter.write_data

    def dying(self: HoldfastWriter, *arguments: Any) -> Any:
        if Path(self.checkpoint_id).name == f"step-{step:012d}":
            die()
        return write_data(self, *arguments)

    HoldfastWriter.write_data = dying  # type: ignore[method-assign]


def main() -> None:
    """Train, or copy a checkpoint, as the settings say."""
    settings = json.loads(sys.argv[1])
    trainer = trainer_of(settings["arguments"])
    if (kill := settings.get("kill")) and kill.pop("rank") == dist.get_rank():
        kill_at(trainer, **kill)
    if "copy" in settings:
        manager = trainer.checkpointer
        assert manager.load(trainer.config.checkpoint.load_step)
        manager.folder = settings["copy"]
        manager.save(trainer.step, last_step=True)
    else:
        trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
