"""A large world: its ranks connect with few others, and say the same as in a small one."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from large_bodies import (
    all_messages,
    generations_of_large,
    meshes_in_large,
    message_until_hurt,
)
from rank_bodies import await_files
from ranks import GRACE_S, fence_file, ranks

from holdfast.elastic.errors import GenerationOverError
from holdfast.elastic.groups.circles import WorldScale

SIZE = 7


@pytest.mark.parametrize(
    ("size", "limits"),
    [
        (7, {}),
        pytest.param(
            64,
            {"scale": WorldScale(many=8, fan_out=8), "node_ranks": 4},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_ranks_of_a_large_world_say_what_those_of_a_small_one_say(
    tmp_path: Path, size: int, limits: dict[str, Any]
) -> None:
    body = functools.partial(all_messages, **limits)
    with ranks(size, body, tmp_path, with_world=False) as running:
        everyone = running.results()
    total = size * (size + 1) // 2
    for rank, found in enumerate(everyone):
        assert found["sum"] == [0, total, 2 * total]
        assert found["max"] == str([float(size), -1.0, float("nan")])
        assert found["any"] == [True, False]
        assert found["gather"] == [{"rank": r, "text": "x" * r} for r in range(size)]
        assert found["long"] == [(3000 * r, True) for r in range(size)]
        plans = [[{"rank": r, "turn": turn} for r in range(size)] for turn in range(3)]
        assert found["plans"] == plans
        assert found["floats"] == [size * size / 2]
        assert found["aside"] == [float(size)]
        assert found["all_reduce"] == [total] * 3
        assert found["broadcast"] == 0.0
        before = 10.0 * ((rank - 1) % size)
        assert found["ring"] == [[before] * 2, [before + 1] * 2]
        far = rank ^ 1 if rank ^ 1 < size else rank
        assert found["batch"] == [10.0 * ((far - 1) % size) if far != rank else 0.0] * 2
        assert "name the source (src=)" in found["refused"]


def test_the_axes_of_a_large_mesh_sum_their_own_ranks(tmp_path: Path) -> None:
    with ranks(6, meshes_in_large, tmp_path, with_world=False) as running:
        for rank, found in enumerate(running.results()):
            assert found["dp"] == (6 if rank % 2 == 0 else 9)
            assert found["tp"] == 2 * (rank - rank % 2) + 1
            assert found["groups"] == [0, 2, 4]


@pytest.mark.parametrize(
    "dies_after_ms",
    [None, *(pytest.param(ms, marks=pytest.mark.exhaustive) for ms in (0, 10, 20, 30, 40, 60, 90))],
)
def test_a_large_world_that_cannot_form_is_left_and_the_next_one_forms(
    tmp_path: Path, dies_after_ms: int | None
) -> None:
    if dies_after_ms is not None:
        (tmp_path / "dies-after-ms").write_text(str(dies_after_ms))
    with ranks(5, generations_of_large, tmp_path, with_world=False) as running:
        await_files([tmp_path / "absent"])
        if dies_after_ms is not None:
            running.processes[-1].join(200)
        time.sleep(0.3)  # let the others wait for it
        fence_file(tmp_path, 1).touch()
        for rank in range(4):
            assert running.result(rank) == ("ok", [40] * 4)


@pytest.mark.parametrize(
    ("victim", "hurt"),
    [
        (2, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.exhaustive),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.exhaustive),
        pytest.param(2, signal.SIGSTOP, marks=pytest.mark.exhaustive),
        pytest.param(6, signal.SIGKILL, marks=pytest.mark.exhaustive),
    ],
)
def test_a_fence_frees_every_rank_of_a_large_world(
    tmp_path: Path, victim: int, hurt: signal.Signals
) -> None:
    with ranks(SIZE, message_until_hurt, tmp_path, with_world=False) as running:
        await_files([tmp_path / f"warm-{rank}" for rank in range(SIZE)])
        pid = running.processes[victim].pid
        assert pid is not None
        os.kill(pid, hurt)
        time.sleep(0.2)  # let the others run into it
        fenced_at = time.time()
        fence_file(tmp_path, 1).touch()
        for rank in set(range(SIZE)) - {victim}:
            kind, text = running.result(rank)
            assert kind == GenerationOverError.__name__, text
            assert float(text.rsplit(" ", 1)[1]) - fenced_at < GRACE_S / 2
