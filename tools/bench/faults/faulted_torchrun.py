"""The job of `faulted` for torchrun, which restarts all ranks from the last checkpoint.

torch.distributed.checkpoint saves it every ``--every`` steps.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

from holdfast.elastic.events import (
    Event,
    RankReformed,
    StateRestored,
    StepDone,
    UserEvent,
    WorkerStarted,
)
from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.tools.bench.faults import faulted_model

SAVED: Final = "saved"
"""Name of the event that reports a complete checkpoint."""

_NEWEST: Final = "newest"
_KEPT: Final = 2


class _TorchrunRank:
    """One rank in one start of the job."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._directory, self._every = Path(args.directory), args.every
        self._rank, self._world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._share = args.microbatches // self._world
        self._start = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
        self._seat = f"trainer/{self._rank}"
        writer = f"rank{self._rank}-{self._start}"
        self._events = EventWriter(events_file(self._directory, writer), node="torchrun")
        self._tell(WorkerStarted(pid=os.getpid(), attempt=self._start))
        # Every start has its own store, so that it meets no entries of earlier ranks.
        meeting = (self._directory / f"meeting-{self._start}").absolute()
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=self._rank, world_size=self._world
        )
        mesh = init_device_mesh("cpu", (self._world,), mesh_dim_names=("dp",))
        self._tell(RankReformed(generation=self._start, rank=self._rank, world=self._world))
        self._model = faulted_model.build(args.size_bytes, mesh=mesh)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-4)
        self._step = self._restore()
        self._tell(StateRestored(generation=self._start, rank=self._rank, step=self._step))

    def _tell(self, event: Event) -> None:
        seated = msgspec.structs.replace(event, seat=self._seat)
        self._events.write(seated, source="worker")

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _restore(self) -> int:
        newest = self._directory / _NEWEST
        if not newest.exists():
            faulted_model.fill(self._model)
            return 0
        step, state = int(newest.read_text()), self._state()
        load(state, checkpoint_id=self._directory / f"step-{step}")
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return step

    def train(self) -> None:
        """Train until ended."""
        data = faulted_model.samples()
        while True:
            start = time.time()
            for microbatch in range(self._share):
                at = (self._step * self._share + microbatch) * self._world + self._rank
                loss = faulted_model.loss(self._model, data[at % len(data)][None])
                (loss / self._share).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._step += 1
            self._tell(
                StepDone(step=self._step, generation=self._start, rank=self._rank, start_s=start)
            )
            if self._step % self._every == 0:
                self._save()

    def _save(self) -> None:
        save(self._state(), checkpoint_id=self._directory / f"step-{self._step}")
        if self._rank == 0:
            fresh = self._directory / f"{_NEWEST}.fresh"
            fresh.write_text(str(self._step))
            fresh.rename(self._directory / _NEWEST)
            old = self._directory / f"step-{self._step - _KEPT * self._every}"
            shutil.rmtree(old, ignore_errors=True)
            self._tell(UserEvent(name=SAVED, fields={"step": self._step}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--every", type=int, required=True)
    torch.set_num_threads(1)
    _TorchrunRank(parser.parse_args()).train()
