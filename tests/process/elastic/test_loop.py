"""The loop re-enters the function in the living process, and keeps nothing of the old world."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lone_channel import LoneChannel
from torch import nn

from holdfast.ckpt.errors import StoreError
from holdfast.elastic.channel.base import WORKER_ENV
from holdfast.elastic.config import Batch, Checkpoints, Settings
from holdfast.elastic.errors import ConfigError, GenerationOverError, StateLostError
from holdfast.elastic.loop import generations
from holdfast.elastic.loop.generations import Loop
from holdfast.elastic.loop.run import Run


def _loop(channel: LoneChannel, **settings: Any) -> Loop:
    found: Any = channel
    batch = Batch(microbatches=1)
    return Loop(found, Settings(batch=batch, **settings), worker_info=lambda: {"more": 1})


def test_a_fenced_generation_is_left_and_forgotten() -> None:
    channel, models, weights = LoneChannel(), [], []

    def body(run: Run) -> str:
        gc.collect()
        assert all(model() is None for model in models), "an old model is still held"
        model = nn.Linear(4, 4)
        models.append(weakref.ref(model))
        weights.append(model.weight.detach().clone())
        assert run.mesh.size() == dist.get_world_size() == 1
        if run.generation == 3:
            return "finished"
        channel.over = run.generation
        if run.generation == 1:
            run.check()
        try:
            run.check()
        except GenerationOverError as fenced:
            raise RuntimeError("connection reset by peer") from fenced
        raise AssertionError("not reached")

    assert _loop(channel).run(body) == "finished"
    assert not dist.is_initialized()
    assert len(models) == 3
    assert all(torch.equal(weight, weights[0]) for weight in weights), "built from the same seed"
    kinds = [said[0] for said in channel.said]
    assert kinds == ["ready", "reformed"] * 3 + ["done"]
    assert [said[1] for said in channel.said if said[0] == "ready"] == [0, 1, 2]


def test_a_state_that_is_half_restored_is_built_anew_in_the_same_generation() -> None:
    channel, models, weights = LoneChannel(), [], []

    def body(run: Run) -> str:
        gc.collect()
        assert all(model() is None for model in models), "the half restored model is still held"
        model = nn.Linear(4, 4)
        models.append(weakref.ref(model))
        weights.append(model.weight.detach().clone())
        if len(models) == 1:
            raise StateLostError("nothing in memory can be read")
        run.track(model=model)
        return "finished"

    assert _loop(channel).run(body) == "finished"
    assert torch.equal(*weights), "built from the same seed"
    kinds = [said[0] for said in channel.said]
    assert kinds == ["ready", "reformed", "restored", "done"]
    restored = next(said[1] for said in channel.said if said[0] == "restored")
    assert (restored.tier, restored.how) == ("none", "nothing in memory can be read")


def test_an_error_of_the_function_ends_the_worker() -> None:
    channel = LoneChannel()

    def body(run: Run) -> None:
        raise ValueError("no such column")

    with pytest.raises(ValueError, match="no such column"):
        _loop(channel).run(body)
    assert ("fail", "ValueError: no such column", False) in channel.said


@pytest.mark.parametrize(
    ("misuse", "named"),
    [
        (lambda run: next(run.steps(3)), "call run.track"),
        (lambda run: next(run.microbatches()), "call run.track"),
        (lambda run: run.backward(torch.zeros(())), "belongs inside"),
        (lambda run: run.step(), "needs the optimizer"),
    ],
)
def test_misuse_is_refused_with_the_remedy(misuse: Any, named: str) -> None:
    channel = LoneChannel()
    with pytest.raises(ConfigError, match=named):
        _loop(channel).run(misuse)
    assert channel.said[-1][0] == "fail"
    assert channel.said[-1][2] is True, "no retry would help"


def test_what_a_launcher_overrides_wrongly_ends_the_job_with_the_reason() -> None:
    channel = LoneChannel()
    channel.settings = {"snapshots": {"keep": 0}}
    with pytest.raises(ConfigError, match="keep=0"):
        _loop(channel).run(lambda run: None)
    kind, why, is_users = channel.said[-1]
    assert (kind, "keep=0" in why, is_users) == ("fail", True, True)


def test_a_checkpoint_directory_that_cannot_be_is_not_tried_again() -> None:
    channel = LoneChannel()

    def body(run: Run) -> None:
        run.track(model=nn.Linear(2, 2))

    with pytest.raises(StoreError, match="/proc/nowhere"):
        _loop(channel, checkpoint=Checkpoints("/proc/nowhere/x")).run(body)
    assert channel.said[-1][0] == "fail"
    assert channel.said[-1][2] is True, "no retry would help"


@pytest.mark.parametrize("launched", [True, False])
def test_a_users_error_is_printed_once_by_the_launcher_or_by_the_script(
    launched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    if launched:
        monkeypatch.setenv(WORKER_ENV, "{}")
    monkeypatch.setattr(generations, "connect", LoneChannel)
    decorated = generations.resilient()(lambda run: run.step())
    with pytest.raises(ConfigError) as caught:
        decorated()
    assert vars(caught.value) == {}
    sys.excepthook(caught.type, caught.value, None)
    said = "" if launched else f"holdfast: {caught.value}\n"
    assert capsys.readouterr().err == said
