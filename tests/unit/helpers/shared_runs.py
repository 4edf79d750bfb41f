"""Runs that share samples through a directory, each as a loop whose samples are noise."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from own_loops import PLAN, Job

from holdfast.adapters.rl.ledger.plan import BatchPlan
from holdfast.adapters.rl.library import Rollouts
from holdfast.adapters.rl.samples.borrowed import Borrowed, GroupOrigin, SharedAnswer, SharedGroup
from holdfast.adapters.rl.samples.trajectory import Stamp
from holdfast.adapters.rl.sharing import sharing
from holdfast.adapters.rl.sharing.settings import Share

OWN, OTHERS = 2, 1


def in_step(call: Callable[[], Any], *, name: str) -> Future[Any]:
    """Stand in for `sharing.beside`: make the call at once, so that its result is there next."""
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - it comes out where the result is taken
        future.set_exception(error)
    return future


@pytest.fixture
def turns_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each turn of a courier within the step that begins it."""
    monkeypatch.setattr(sharing, "beside", in_step)


def share_of(place: Path, name: str, **options: Any) -> Share:
    settings = {"own": OWN, "others": OTHERS, "family": "noise"} | options
    return Share(meet=str(place), name=name, **settings)


def shared_job(steps: int = 8, **changes: Any) -> Job:
    shape = {"groups": OWN + OTHERS, "steps": steps} | changes
    return Job(msgspec.structs.replace(PLAN, **shape))


def origins(batch: list[Any]) -> list[str]:
    """Return the origins of the borrowed groups of a batch, in order."""
    return list(dict.fromkeys(str(each.origin) for each in batch if isinstance(each, Borrowed)))


def train(job: Job, rollouts: Rollouts, steps: int) -> list[list[Any]]:
    return [job.step(rollouts) for _ in range(steps)]


def group_of(
    plan: BatchPlan = PLAN,
    *,
    island: str = "oslo",
    ordinal: int = 0,
    family: str = "f",
    **facts: Any,
) -> SharedGroup:
    """Return a group of two answers, `9` being the end."""
    answer = SharedAnswer(
        tokens=(5, 9),
        logprobs=(-1.0, -2.0),
        stamps=(Stamp(generation=1, version=0, count=2),),
        **facts,
    )
    return SharedGroup(
        origin=GroupOrigin(island=island, lineage="aa", ordinal=ordinal),
        family=family,
        prompt=(1, 2),
        answers=(answer,) * plan.group,
    )
