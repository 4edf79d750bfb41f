"""A job that trains until it is ended, under ``holdfast run``, to measure the cost of faults."""

from __future__ import annotations

import argparse
import signal
import threading
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
    )
    def train(run: elastic.Run) -> None:
        model = faulted_model.build(args.size_bytes, mesh=run.mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        run.track(model=model, optimizer=optimizer)
        if run.completed == 0:
            faulted_model.fill(model)
        for _ in run.steps(_FOREVER):
            for batch in run.microbatches(data):
                hang.here(run)
                run.backward(faulted_model.loss(model, batch))
            run.step(optimizer)

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--world", type=int, default=0)
    parser.add_argument("--parity", type=int, default=0)
    main(parser.parse_args())
