"""The trainer's reaction to the checker's findings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from holdfast.adapters.rl.config import preset
from holdfast.adapters.rl.ledger.checker import CheckConfig, StepChecker
from holdfast.adapters.rl.loss.batch import collate
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory
from holdfast.adapters.rl.training.trainer import Trainer
from holdfast.ckpt.errors import NotFoundError
from holdfast.elastic.errors import JobFailedError
from holdfast.elastic.events import Event

SAMPLE = Trajectory(
    ordinal=3,
    sample=1,
    prompt=(97, 62),
    tokens=(98, 10),
    logprobs=(-1.0, -2.0),
    stamps=(Stamp(generation=1, version=0, count=2),),
)


class Step:
    """A step of a trainer whose rows differ by ``difference``, or cannot be looked at again."""

    def __init__(self, difference: float | Exception, **check: Any) -> None:
        self.events: list[Event] = []
        self.difference = difference
        config = msgspec.structs.replace(preset("tiny"), check=CheckConfig(**check))
        self.trainer: Any = Trainer.__new__(Trainer)
        self.trainer._config = config
        session = SimpleNamespace(emit=self.events.append)
        self.checker = StepChecker()
        learner = SimpleNamespace(recheck=SimpleNamespace(difference=self.look))
        self.job: Any = SimpleNamespace(
            session=session, checker=self.checker, learners={"": learner}
        )
        self.batch = collate([SAMPLE], torch.zeros(1), rows=4, length=config.model.context)

    def look(self, batch: Any, row: int) -> float:
        assert row == 0
        if isinstance(self.difference, Exception):
            raise self.difference
        return self.difference

    def look_again(self, step: int) -> list[str]:
        self.trainer._look_again(self.job, step, {"": self.batch}, [SAMPLE])
        return [event.kind for event in self.events]


def test_by_default_nothing_is_computed_anew() -> None:
    assert Step(1.0).look_again(0) == []


def test_a_row_is_computed_anew_when_it_is_time_for_that() -> None:
    step = Step(1e-6, recompute_every=2)
    assert step.look_again(1) == []
    assert step.look_again(2) == ["rechecked"]
    assert step.checker.count == 0


def test_a_row_that_is_off_is_told_and_ends_the_job_where_that_is_wanted() -> None:
    step = Step(1e-3, recompute_every=1)
    assert step.look_again(0) == ["rechecked", "violation"]
    assert step.checker.count == 1
    fatal = Step(1e-3, recompute_every=1, fatal=True)
    with pytest.raises(
        JobFailedError, match=r"sample \(3, 1\): its log-probabilities.*check.fatal"
    ):
        fatal.look_again(0)


def test_a_version_that_is_gone_is_said_and_is_no_violation() -> None:
    step = Step(NotFoundError("version 0 is not kept"), recompute_every=1, fatal=True)
    assert step.look_again(0) == ["recheck_skipped"]
    assert step.checker.count == 0
