"""Plans of runs with an Accelerator, and processes for them that are forked with their imports.

The test's own process imports neither torch nor accelerate for them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports

DEADLINE_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run: how it shards, and what it does beside training.

    A noisy one has dropout, running statistics, accumulation, and samples that are drawn. With
    ``fixed_buckets`` DDP sums all gradients in one order: otherwise it changes the order after the
    first step, which more than two ranks notice in the last bits. With ``die_at`` every rank kills
    itself after that step.
    """

    root: Path
    sharded: bool = False
    is_split: bool = False
    noisy: bool = True
    seedable: bool = False
    iterable: bool = False
    fixed_buckets: bool = False
    die_at: int | None = None


class Launcher:
    """Runs the ranks of plans."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def run(self, plan: Plan, *, ranks: int) -> list[Any]:
        """Return what each rank sent; None of one that killed itself as planned."""
        port, pipes, processes = free_ports(1)[0], [], []
        for rank in range(ranks):
            mine, theirs = self._context.Pipe(duplex=False)
            process = self._context.Process(target=_main, args=(rank, ranks, port, plan, theirs))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            found = [_received(pipe) for pipe in pipes]
            for process in processes:
                process.join(DEADLINE_S)
            wanted = 0 if plan.die_at is None else -signal.SIGKILL
            assert [each.exitcode for each in processes] == [wanted] * ranks, found
            return found
        finally:
            for process in processes:
                process.kill()


def _main(rank: int, world_size: int, port: int, plan: Plan, pipe: Connection) -> None:
    import accelerate_bodies

    accelerate_bodies.rank_main(rank, world_size, port, plan, pipe)


def _received(pipe: Any) -> Any:
    assert pipe.poll(DEADLINE_S), "a rank said nothing"
    try:
        return pipe.recv()
    except EOFError:  # it was killed
        return None


@contextmanager
def launcher() -> Iterator[Launcher]:
    """Give a launcher; nothing of it is left afterwards."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # of the preload
        patch.setenv("OMP_NUM_THREADS", "1")
        context.set_forkserver_preload(["accelerate_bodies"])
        forkserver.ensure_running()
    yield Launcher(context)
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
