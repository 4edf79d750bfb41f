"""A run of one rank in the test's own process, without agents and sidecars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rank_bodies import run_of
from ranks import KEY, enter

from holdfast.elastic.config import Batch, Exact, Settings
from holdfast.elastic.groups import reform
from holdfast.elastic.loop.run import Run
from holdfast.elastic.loss import LossGuard
from holdfast.elastic.meeting.point import MeetingPoint


@contextmanager
def lone_run(
    folder: Path,
    *,
    exact: Exact = "float32",
    microbatches: int = 4,
    guard: LossGuard | None = None,
) -> Iterator[Run]:
    """Yield the run; on leaving, its group and all its hooks are gone."""
    meeting = MeetingPoint(KEY)
    world = enter(0, [meeting.address], folder)
    batch = Batch(microbatches=microbatches, size=2)
    settings = Settings(batch=batch, exact=exact, loss_guard=guard)
    run, _ = run_of(world, settings)
    try:
        yield run
    finally:
        run._close()
        reform.leave()
        meeting.close()
