"""The interruptible process group: right results, and no rank stays after its generation ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from large_bodies import all_collectives_of_large
from rank_bodies import (
    all_collectives,
    await_files,
    form_again_and_again,
    plan_alone,
    reduce_until_hurt,
)
from ranks import GRACE_S, fence_file, ranks
from tree import ROOT

from holdfast.elastic.channel.base import WORKER_ENV
from holdfast.elastic.errors import GenerationOverError


@pytest.mark.parametrize(
    ("body", "with_world"), [(all_collectives, True), (all_collectives_of_large, False)]
)
def test_every_collective_gives_what_gloo_gives(
    tmp_path: Path, body: Callable[..., Any], with_world: bool
) -> None:
    with ranks(3, body, tmp_path, with_world=with_world) as running:
        for rank, found in enumerate(running.results()):
            assert found["all_reduce"] == [6.0] * 3
            assert found["max"] == 2.0
            assert found["all_gather"] == [0.0, 1.0, 2.0]
            assert found["reduce_scatter"] == [3.0 * 2 * rank, 3.0 * (2 * rank + 1)]
            assert found["broadcast"] == 2.0
            assert found["list"] == [0.0, 10.0, 20.0]
            assert found["all_to_all"] == [10.0 * other + rank for other in range(3)]
            assert found["gather"] == [{"rank": r, "text": "x" * r} for r in range(3)]


@pytest.mark.parametrize(
    "hurt", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive)]
)
def test_a_fence_frees_every_rank_in_a_blocked_collective(
    tmp_path: Path, hurt: signal.Signals
) -> None:
    with ranks(3, reduce_until_hurt, tmp_path) as running:
        await_files([tmp_path / f"warm-{rank}" for rank in range(3)])
        victim = running.processes[1].pid
        assert victim is not None
        os.kill(victim, hurt)
        time.sleep(0.2)  # let the others run into it
        fenced_at = time.time()
        fence_file(tmp_path, 1).touch()
        for rank in (0, 2):
            kind, text = running.result(rank)
            assert kind == GenerationOverError.__name__, text
            assert float(text.rsplit(" ", 1)[1]) - fenced_at < GRACE_S / 2


def test_a_group_that_cannot_form_is_left_and_the_next_one_forms(tmp_path: Path) -> None:
    with ranks(3, form_again_and_again, tmp_path, with_world=False) as running:
        time.sleep(0.3)
        fence_file(tmp_path, 1).touch()
        assert running.result(0) == ("ok", [3.0] * 10)
        assert running.result(1) == ("ok", [3.0] * 10)


def test_a_rank_that_plans_alone_is_told_and_spoils_no_gradients(tmp_path: Path) -> None:
    with ranks(2, plan_alone, tmp_path) as running:
        alone, other = running.results()
    assert alone["sums"] == other["sums"] == [[3.0]] * 3
    assert "model.extra is new" in alone["error"]
    assert "rank 1 did not begin to plan" in alone["error"]
    assert other["error"] == ""
    assert other["taken"] >= 2


LEAVING = """
import ctypes, sys, time
from holdfast.elastic.groups.waits import WaitGuard
from holdfast.elastic.errors import GenerationOverError
fenced_s = time.monotonic() + 0.2
guard = WaitGuard(1, lambda: time.monotonic() > fenced_s)
try:
    guard.call(lambda: ctypes.CDLL(None).sleep(1000), name="stuck")
except GenerationOverError:
    print("fenced")
{then}
"""


@pytest.mark.parametrize(("then", "code"), [("", 0), ("raise ValueError('wrong')", 1)])
def test_a_worker_ends_though_a_call_it_left_behind_does_not_come_back(
    then: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING.format(then=then)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), WORKER_ENV: "{}"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "fenced\n"), done.stderr
    assert ("ValueError: wrong" in done.stderr) == bool(code)
