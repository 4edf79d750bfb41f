"""A job that trains until it is ended, under ``holdfast run``, to measure the cost of faults."""

from __future__ import annotations

import argparse
import signal
import threading
import time
from typing import Final

import torch

from holdfast import elastic
from holdfast.elastic.events import UserEvent
from holdfast.tools.bench.faults import faulted_model

HANG_SIGNAL: Final = signal.SIGUSR1
HUNG: Final = "hung"
"""Name of the event that reports a hang."""

_FOREVER: Final = 10**9


class _Hang:
    """Hangs in the middle of a step, forever, once a signal has asked for it."""

    def __init__(self) -> None:
        self._reported = False
        signal.signal(HANG_SIGNAL, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._reported = True

    def here(self, run: elastic.Run) -> None:
        """Hang if the signal has arrived."""
        if self._reported:
            elastic.session_of(run).emit(UserEvent(name=HUNG))
            threading.Event().wait()


def main(args: argparse.Namespace) -> None:
    """Train a model whose state, with Adam's moments, has about ``args.size_bytes``."""
    torch.set_num_threads(1)
    data, hang = faulted_model.samples(), _Hang()

    @elastic.resilient(
        mesh=elastic.Mesh(dp=args.world or "auto"),
        batch=elastic.Batch(microbatches=args.microbatches, size=1),
        snapshots=elastic.Snapshots(parity=args.parity),
        checkpoint=_checkpoints(args),
        islands=_islands(args),
    )
    def train(run: elastic.Run) -> None:
        model = faulted_model.build(args.size_bytes, mesh=run.mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        run.track(model=model, optimizer=optimizer)
        if run.completed == 0:
            faulted_model.fill(model)
        for _ in run.steps(_FOREVER):
            end_s = time.monotonic() + args.pace_s
            for batch in run.microbatches(data):
                hang.here(run)
                run.backward(faulted_model.loss(model, batch))
            time.sleep(max(0.0, end_s - time.monotonic()))
            run.step(optimizer)

    train()


def _checkpoints(args: argparse.Namespace) -> elastic.Checkpoints | None:
    if not args.checkpoint:
        return None
    return elastic.Checkpoints(args.checkpoint, every=args.checkpoint_every)


def _islands(args: argparse.Namespace) -> elastic.Islands | None:
    """Return the settings of one island of two; the launcher gives its name and meeting place."""
    if not args.every:
        return None
    return elastic.Islands(every=args.every, portions=1, overlap=2, founders=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--world", type=int, default=0)
    parser.add_argument("--parity", type=int, default=0)
    parser.add_argument("--pace-s", type=float, default=0.0, help="least seconds of a step")
    parser.add_argument("--checkpoint", default="", help="root of checkpoints")
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--every", type=int, default=0, help="be an island that merges so often")
    main(parser.parse_args())
