"""Runs of their own for three policies, and for one with tensor parallelism: kills do not show."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobs import Job, hurt
from policy_jobs import job_of_policies
from rl_jobs import alone, rl_job
from tree import HELPERS

from holdfast.adapters.rl.config import RLConfig, WarmStart
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.policy.settings import PolicyConfig

pytestmark = [pytest.mark.timeout(1200), pytest.mark.exhaustive]


@contextmanager
def runs_of(place: Path, config: RLConfig) -> Iterator[dict[str, Job]]:
    """Start the run of every policy; the first one has a rollout worker."""
    with ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for policy in config.trained:
            (place / policy).mkdir(parents=True)
            own = of(config, policy, place)
            workers = 1 if own.leads else 0
            jobs[policy] = stack.enter_context(rl_job(place / policy, own, rollouts=workers))
        yield jobs


def of(config: RLConfig, policy: str, place: Path) -> RLConfig:
    return msgspec.structs.replace(config, join=str(place / "join"), policy=policy)


def finished(place: Path, jobs: Mapping[str, Job]) -> dict[str, dict[str, Any]]:
    for job in jobs.values():
        outcome = job.finish()
        assert outcome.ok, outcome.message
    found = {each: json.loads((place / each / "result.json").read_bytes()) for each in jobs}
    for outcome in found.values():
        assert outcome["ledger"]["ok"], outcome["ledger"]
    return found


def learnt(found: Mapping[str, dict[str, Any]]) -> dict[str, list[Any]]:
    names = ("final_hash", "reward", "rewards", "policies", "heldout")
    return {policy: [each[name] for name in names] for policy, each in found.items()}


def kill_leader(job: Job) -> None:
    hurt(job.worker(job.events("proposed")[-1]["ranks"][0]), signal.SIGKILL)


def test_three_policies_learn_what_they_learn_undisturbed_and_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(HELPERS)
    monkeypatch.setenv("PYTHONPATH", str(HELPERS), prepend=os.pathsep)
    config = msgspec.structs.replace(
        job_of_policies(tmp_path / "warm", steps=5),
        environment=EnvironmentConfig(factory="three_voices:ThreeVoices"),
        policies={
            "solver": PolicyConfig(),
            "critic": PolicyConfig(lr=1e-4),
            "judge": PolicyConfig(lr=2e-4),
        },
        warm=WarmStart(steps=0),
        warm_start=None,
    )
    calm, struck, one = tmp_path / "calm", tmp_path / "struck", tmp_path / "one"
    for policy in config.trained:
        (calm / policy).mkdir(parents=True)
    one.mkdir()
    with ThreadPoolExecutor() as pool:
        each = pool.map(lambda name: alone(calm / name, of(config, name, calm)), config.trained)
        expected = dict(zip(config.trained, each, strict=True))
    together = alone(one, config)
    assert together["rewards"] == {name: expected[name]["rewards"][name] for name in expected}
    assert all(book["tokens"] for book in together["policies"].values())
    with runs_of(struck, config) as jobs:
        jobs["judge"].await_step(2)
        kill_leader(jobs["judge"])
        jobs["judge"].await_event(lambda e: e["kind"] == "restored" and e["generation"] >= 2)
        found = finished(struck, jobs)
    assert learnt(found) == learnt(expected)


def test_a_policy_whose_heads_are_shared_by_two_ranks_loses_one_and_nothing_shows(
    tmp_path: Path,
) -> None:
    config = job_of_policies(tmp_path / "warm", steps=5)
    critic = msgspec.structs.replace(config.policies["critic"], tp=2)
    config = msgspec.structs.replace(
        config, policies={**config.policies, "critic": critic}, join="below", policy="solver"
    )
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    with runs_of(calm, config) as jobs:
        expected = finished(calm, jobs)
    with runs_of(struck, config) as jobs:
        jobs["critic"].await_step(2)
        hurt(jobs["critic"].worker("trainer/1"), signal.SIGKILL)
        jobs["critic"].await_event(lambda e: e["kind"] == "restored" and e["generation"] >= 2)
        found = finished(struck, jobs)
    assert learnt(found) == learnt(expected)
