"""Two policies in two runs, with real processes: no kill shows in the weights of either."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobs import Job, hurt
from policy_jobs import job_of_policies
from rl_jobs import alone, commanded, rl_job

from holdfast.adapters.rl.config import RLConfig

pytestmark = [pytest.mark.timeout(600), pytest.mark.exhaustive]

TEAM = ("solver", "critic")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RLConfig:
    """Return a job in which a critic helps a solver, and a copy of the solver stays as it was."""
    return job_of_policies(tmp_path_factory.mktemp("warm"), steps=6)


@pytest.fixture(scope="module")
def undisturbed(
    config: RLConfig, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Return the outcomes of the two runs, each in one process that was started by hand."""
    place = tmp_path_factory.mktemp("apart")
    for policy in TEAM:
        (place / policy).mkdir()

    def outcome(policy: str) -> dict[str, Any]:
        return alone(place / policy, of(config, policy, join=place / "join"))

    with ThreadPoolExecutor() as pool:
        return dict(zip(TEAM, pool.map(outcome, TEAM), strict=True))


def of(config: RLConfig, policy: str, *, join: Path, **changes: Any) -> RLConfig:
    return msgspec.structs.replace(config, join=str(join), policy=policy, **changes)


@contextmanager
def pair(place: Path, config: RLConfig, **held: Any) -> Iterator[tuple[Job, Job]]:
    """Start both runs; ``held`` are further settings of the critic's."""
    for policy in TEAM:
        (place / policy).mkdir()
    solver, critic = (of(config, policy, join=place / "join") for policy in TEAM)
    with (
        rl_job(place / "solver", solver, rollouts=1) as lead,
        rl_job(place / "critic", msgspec.structs.replace(critic, **held), rollouts=0) as other,
    ):
        yield lead, other


def require_same(place: Path, expected: dict[str, dict[str, Any]]) -> None:
    for policy in TEAM:
        found = json.loads((place / policy / "result.json").read_bytes())
        for name in ("final_hash", "reward", "rewards", "policies", "heldout"):
            assert found[name] == expected[policy][name], (policy, name)
        assert found["ledger"]["ok"], found["ledger"]


def kill_leader(job: Job) -> None:
    hurt(job.worker(job.events("proposed")[-1]["ranks"][0]), signal.SIGKILL)


def finish(*jobs: Job) -> None:
    for job in jobs:
        outcome = job.finish()
        assert outcome.ok, outcome.message


def test_apart_they_learn_what_they_learn_in_one_run(
    tmp_path: Path, config: RLConfig, undisturbed: dict[str, dict[str, Any]]
) -> None:
    together = alone(tmp_path, config)
    apart = {**undisturbed["solver"]["rewards"], **undisturbed["critic"]["rewards"]}
    assert apart == together["rewards"]
    for policy in TEAM:
        assert undisturbed[policy]["policies"] == together["policies"]
    assert undisturbed["solver"]["heldout"] == together["heldout"]
    assert undisturbed["critic"]["heldout"] == []
    assert undisturbed["solver"]["final_hash"] != undisturbed["critic"]["final_hash"]


def test_the_lead_goes_on_up_to_the_lag_while_a_trainer_of_the_other_is_lost(
    tmp_path: Path, config: RLConfig, undisturbed: dict[str, dict[str, Any]]
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    with pair(tmp_path, config, hold=str(hold)) as (lead, critic):
        waits = lead.await_event(lambda e: e["kind"] == "policy_awaited" and e["version"] == 1)
        assert (waits["policy"], waits["newest"], waits["step"]) == ("critic", 0, 4)
        lead.await_step(3)  # versions 0 of the critic sample steps up to its lag
        kill_leader(critic)
        critic.await_event(lambda e: e["kind"] == "restored" and e["generation"] >= 2)
        hold.unlink()
        finish(lead, critic)
    require_same(tmp_path, undisturbed)


def test_lost_trainers_of_both_show_in_neither(
    tmp_path: Path, config: RLConfig, undisturbed: dict[str, dict[str, Any]]
) -> None:
    with pair(tmp_path, config) as (lead, critic):
        lead.await_step(2)
        kill_leader(lead)
        critic.await_step(2)
        kill_leader(critic)
        for job in (lead, critic):
            job.generation(2)
        lead.await_event(lambda e: e["kind"] == "sampling" and e["samples"])
        hurt(lead.worker("rollout/0"))
        finish(lead, critic)
    require_same(tmp_path, undisturbed)


def test_killed_whole_each_goes_on_from_its_own_checkpoint(
    tmp_path: Path, config: RLConfig, undisturbed: dict[str, dict[str, Any]]
) -> None:
    hold = tmp_path / "hold"
    changes = {"checkpoint": str(tmp_path / "root"), "hold": str(hold), "checkpoint_every": 2}
    for policy in TEAM:
        (tmp_path / policy).mkdir()
    solver, critic = (of(config, each, join=tmp_path / "join", **changes) for each in TEAM)
    with (
        commanded(tmp_path / "solver" / "first", solver) as lead,
        commanded(tmp_path / "critic" / "first", critic, rollouts=0) as other,
    ):
        other.job.await_event(lambda e: e["kind"] == "checkpoint_done" and e["step"] >= 2)
        other.kill_all()
        lead.job.await_event(
            lambda e: e["kind"] == "policy_awaited" and e["newest"] == -1 and e["step"] > 1
        )
        lead.kill_all()
    with (
        commanded(tmp_path / "solver" / "second", solver) as lead,
        commanded(tmp_path / "critic" / "second", critic, rollouts=0) as other,
    ):
        found = {"solver": lead.result(), "critic": other.result()}
        for command in (lead, other):
            assert {event["tier"] for event in command.job.events("restored")} == {"checkpoint"}
    for policy in TEAM:
        (tmp_path / policy / "result.json").write_text(json.dumps(found[policy]))
    require_same(tmp_path, undisturbed)
