"""Real RL jobs whose roles are out of balance move a worker and end with the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobs import Job, hurt
from rl_jobs import alone, rl_job

from holdfast.adapters.rl.balance.settings import BalanceConfig
from holdfast.adapters.rl.config import RLConfig, WarmStart, preset
from holdfast.adapters.rl.environments.registry import EnvironmentConfig

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

LATENCY_S = 0.6


def held_up(latency_s: float) -> RLConfig:
    """Return a job whose trainers wait for a tool; each worker has two calls at work."""
    tiny = preset("tiny")
    return msgspec.structs.replace(
        tiny,
        environment=EnvironmentConfig(
            factory="slow_tool",
            settings={"latency_s": latency_s, "latency_tail": 0.0, "turns": 1.0, "turns_tail": 0.0},
            threads=2,
            waiting=0,
            limit_s=200.0,
        ),
        model=msgspec.structs.replace(tiny.model, context=32),
        warm=WarmStart(steps=0),
        slots=2,
        steps=20,
        evaluate_every=20,
        balance=BalanceConfig(window=2),
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The outcome of an undisturbed job of one process, whose tool replies at once."""
    quick = msgspec.structs.replace(held_up(0.001), balance=None)
    yield alone(tmp_path_factory.mktemp("alone"), quick)


def has_moved(job: Job) -> dict[str, Any]:
    return job.await_event(lambda e: e["kind"] == "role_moved")


def check(directory: Path, job: Job, expected: dict[str, Any]) -> None:
    outcome = job.finish()
    assert outcome.ok, outcome.message
    result = json.loads((directory / "result.json").read_bytes())
    assert result["final_hash"] == expected["final_hash"]
    assert result["reward"] == expected["reward"]
    assert result["ledger"]["ok"], result["ledger"]
    assert result["violations"] == []


def test_a_trainer_that_waits_becomes_a_rollout_worker(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    with rl_job(tmp_path, held_up(LATENCY_S)) as job:
        moved = has_moved(job)
        assert (moved["was"], moved["becomes"]) == ("trainer/1", "rollout/2")
        assert moved["waits"] > 0.3
        assert moved["expected_s"] < 0.9 * moved["step_s"]
        assert "trainers wait for" in moved["why"]
        job.world_of(1)
        check(tmp_path, job, expected)


@pytest.mark.parametrize("victim", ["moved", "successor", "rank 0", "agent"])
def test_a_kill_in_the_middle_of_a_move_does_not_show_in_the_outcome(
    tmp_path: Path, expected: dict[str, Any], victim: str
) -> None:
    with rl_job(tmp_path, held_up(LATENCY_S)) as job:
        moving = job.worker("trainer/1")
        moved = has_moved(job)
        match victim:
            case "moved":
                with suppress(ProcessLookupError):  # it may be gone already
                    hurt(moving)
            case "successor":
                hurt(job.worker(moved["becomes"]))
            case "rank 0":
                hurt(job.worker("trainer/0"))
            case "agent":
                hurt(job.launcher.processes()[moved["on"]].agent)
        check(tmp_path, job, expected)
        assert job.events("proposed")[-1]["ranks"] == ["trainer/0"]
