"""A loop that is left in unusual ways, in a run of one rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lone_run import lone_run

from holdfast.elastic.channel.base import WorkerPhase
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.run import Run
from holdfast.elastic.tracked.protection import Protection

DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
HERE = rf"{Path(__file__).name}:\d+"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run of one rank that tracks a model and has no step yet."""
    with lone_run(tmp_path) as found:
        model = torch.nn.Linear(4, 1)
        parts = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
        found.track(model=model, optimizer=parts.optimizer)
        found.parts = parts  # type: ignore[attr-defined]
        yield found


def train(run: Run) -> None:
    """Do the work of a step."""
    parts: Any = run.parts  # type: ignore[attr-defined]
    for x in run.microbatches(DATA):
        loss = parts.model(x).square().mean()
        run.backward(loss)
        run.log(loss=loss)
    run.step(parts.optimizer)


def all_protected(run: Run) -> None:
    """Make every complete step protected."""
    keeper: Any = run._keeper
    keeper.protection = lambda: Protection(step=keeper.cursor.step, age_s=0.0)


@pytest.mark.parametrize("at", [0, 3])
def test_a_break_before_a_step_has_an_update_leaves_it_out(run: Run, at: int) -> None:
    all_protected(run)
    got: list[int] = []
    run.on_protected(lambda step, metrics: got.append(step))
    for step in run.steps(10):
        if step == at:
            break
        train(run)
    assert run.completed == at
    run._finish()
    assert (run.completed, run._keeper.cursor.stopped) == (at, True)
    assert got == list(range(at)), "none is missing at the end"


def test_what_follows_a_break_is_no_silence_of_a_step(run: Run) -> None:
    shown: list[WorkerPhase] = []
    channel: Any = run._parts.channel
    channel.beat = lambda *, phase, **_: shown.append(phase)
    for _ in run.steps(10):
        train(run)
        break
    assert (run.completed, shown[-1]) == (1, WorkerPhase.IDLE)


def test_a_loop_whose_iterator_is_kept_counts_its_last_step_at_the_end(run: Run) -> None:
    steps = run.steps(10)  # as a progress bar keeps it
    for _ in steps:
        train(run)
        break
    run._finish()
    assert (run.completed, run._keeper.cursor.stopped) == (1, True)
    steps.close()  # type: ignore[attr-defined]
    assert run.completed == 1


def test_a_stop_in_the_last_step_changes_nothing(run: Run) -> None:
    for step in run.steps(3):
        train(run)
        if step == 2:
            run.stop()
    assert run.completed == 3


def test_epochs_end_with_the_step_that_stops(run: Run) -> None:
    loader = run.loader(DATA, batch=8)
    for step in run.epochs(3, loader):
        parts: Any = run.parts  # type: ignore[attr-defined]
        for x in run.microbatches(loader):
            run.backward(parts.model(x).square().mean())
        run.step(parts.optimizer)
        if step == 10:
            run.stop()
    assert run.completed == 11


def _second(run: Run, first: str) -> None:
    steps = run.steps(10)
    for _ in steps:
        train(run)
        if first == "stop":
            run.stop()
        elif first == "nested":
            list(run.steps(20))
        elif first == "break":
            break
    if first == "break, dropped":
        del steps
    list(run.steps(20))


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("stop", "follows one that run.stop ended after 1 steps: the run is complete then"),
        ("nested", "begins before step 0 of the first is over: end the first loop"),
        ("break", "begins before step 0 of the first is over: .* its iterator is kept"),
    ],
)
def test_a_second_loop_before_the_end_of_the_first_is_refused(
    run: Run, first: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^a second loop over run.steps at {HERE} {said}"):
        _second(run, first)


def test_a_second_loop_after_a_break_is_refused(run: Run) -> None:
    for _ in run.steps(10):
        train(run)
        break
    with pytest.raises(ConfigError, match=f"at {HERE} follows one that was left by `break`"):
        list(run.steps(20))


def test_an_error_of_the_logger_ends_the_step_that_called_it(run: Run) -> None:
    all_protected(run)

    def write(step: int, metrics: dict[str, float]) -> None:
        raise OSError(28, "No space left on device")

    run.on_protected(write)
    with pytest.raises(OSError, match=re.escape("[Errno 28]")):
        for _ in run.steps(10):
            train(run)
    assert run.completed == 1, "the first step is protected at the end of the second"
