"""The job of `faulted` for torchft: one data-parallel replica, which holds the whole state.

With ``--lighthouse`` it is the lighthouse instead, through which the replicas meet.
"""

from __future__ import annotations

import argparse
import importlib
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from holdfast.ckpt.torch_private import TCPStore
from holdfast.elastic.events import Event, RankReformed, StepDone, WorkerStarted
from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.tools.bench.faults import faulted_model

_HOST: Final = "127.0.0.1"


def serve(args: argparse.Namespace) -> None:
    """Run the lighthouse, and write its address to a file."""
    coordination = importlib.import_module("torchft.coordination")
    options = {"heartbeat_timeout_ms": args.heartbeat_ms} if args.heartbeat_ms else {}
    server = coordination.LighthouseServer(bind=f"{_HOST}:0", min_replicas=1, **options)
    fresh = Path(args.directory) / "lighthouse.fresh"
    fresh.write_text(server.address())
    fresh.rename(Path(args.directory) / "lighthouse")
    threading.Event().wait()


class _Replica:
    """One replica; torchft calls the participating replicas a quorum and numbers the quorums."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._seat = f"trainer/{args.replica}"
        directory = Path(args.directory)
        name = f"replica{args.replica}-{os.getpid()}"
        self._events = EventWriter(events_file(directory, name), node="torchft")
        self._quorum, self._world = -1, 0
        self._model = model = faulted_model.build(args.size_bytes)
        faulted_model.fill(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        gloo = importlib.import_module("torchft.process_group").ProcessGroupGloo
        self._manager = importlib.import_module("torchft.manager").Manager(
            pg=gloo(timeout=timedelta(seconds=60)),
            load_state_dict=lambda state: _load(state, model, optimizer),
            state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            min_replica_size=1,
            rank=0,
            world_size=1,
            store_addr=_HOST,
            store_port=self._store.port,
            lighthouse_addr=(directory / "lighthouse").read_text(),
            replica_id=f"replica_{args.replica}",
            hostname=_HOST,
        )
        self._optimizer = importlib.import_module("torchft.optim").OptimizerWrapper(
            self._manager, optimizer
        )
        self._tell(WorkerStarted(pid=os.getpid()))

    def _tell(self, event: Event) -> None:
        seated = msgspec.structs.replace(event, seat=self._seat)
        self._events.write(seated, source="worker")

    def train(self) -> None:
        """Train until ended; a step that is not committed does not count."""
        data, manager = faulted_model.samples(), self._manager
        at = os.getpid()
        while True:
            self._optimizer.zero_grad()
            manager.wait_quorum()
            before = self._quorum, self._world
            self._quorum, self._world = manager._quorum_id, manager.num_participants()
            if (self._quorum, self._world) != before:
                self._tell(RankReformed(generation=self._quorum, world=self._world))
            start, at = time.time(), at + 1
            loss = faulted_model.loss(self._model, data[at % len(data)][None])
            torch.autograd.backward(loss)
            # torchft's DDP wrapper is not used: that of 0.2.0 fails in the buckets after a failed
            # one.
            for work in [manager.allreduce(each.grad) for each in self._model.parameters()]:
                work.wait()
            step = manager.current_step()
            self._optimizer.step()
            if manager.current_step() > step:
                step = manager.current_step()
                self._tell(StepDone(step=step, generation=self._quorum, start_s=start))


def _load(state: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--size-bytes", type=int, default=0)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--lighthouse", action="store_true")
    parser.add_argument("--heartbeat-ms", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.lighthouse:
        serve(arguments)
    else:
        _Replica(arguments).train()
