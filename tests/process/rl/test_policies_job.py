"""Jobs of several policies with real processes: kills do not show in any policy's weights."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobs import hurt
from policy_jobs import job_of_policies
from rl_jobs import alone, commanded, rl_job

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.ledger.plan import Mode
from holdfast.adapters.rl.policy.settings import PolicyConfig, StartWeights

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RLConfig:
    """Return a job in which a critic helps a solver, and a copy of the solver stays as it was."""
    return job_of_policies(tmp_path_factory.mktemp("warm"), steps=5)


@pytest.fixture(scope="module")
def undisturbed(config: RLConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the outcome of the job in one process, started by hand."""
    return alone(tmp_path_factory.mktemp("alone"), config)


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("final_hash", "reward", "rewards", "policies", "heldout"):
        assert found[name] == expected[name], name
    assert found["ledger"]["ok"], found["ledger"]


def test_each_policy_is_trained_on_what_it_said(undisturbed: dict[str, Any]) -> None:
    books, rewards = undisturbed["policies"], undisturbed["rewards"]
    assert books["solver"]["turns"] > books["critic"]["turns"] > 0
    assert books["old"] == {"turns": 0, "tokens": 0}
    assert [*rewards] == ["solver", "critic"]
    assert [len(each) for each in rewards.values()] == [5, 5]
    total = sum(book["tokens"] for book in books.values())
    assert total == undisturbed["ledger"]["tokens_sampled"]
    assert undisturbed["staleness_max"] == 2


def test_kills_of_a_rollout_worker_and_the_leading_trainer_show_in_no_policy(
    tmp_path: Path, config: RLConfig, undisturbed: dict[str, Any]
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    with rl_job(tmp_path, msgspec.structs.replace(config, hold=str(hold))) as job:
        seat = "rollout/0"
        job.await_event(lambda e: e["kind"] == "sampling" and e["seat"] == seat and e["samples"])
        hurt(job.worker(seat))
        job.await_event(lambda e: e["kind"] == "rollout_recovered" and e["worker"] == seat)
        hold.unlink()
        job.await_step(2)
        hurt(job.worker(job.events("proposed")[-1]["ranks"][0]), signal.SIGKILL)
        job.generation(2)
        outcome = job.finish()
        assert outcome.ok, outcome.message
    require_same(json.loads((tmp_path / "result.json").read_bytes()), undisturbed)


@pytest.mark.exhaustive
def test_a_policy_grows_from_anothers_checkpoint_and_plays_against_it(
    tmp_path: Path, config: RLConfig
) -> None:
    first, root = tmp_path / "first", str(tmp_path / "root")
    first.mkdir()
    config = msgspec.structs.replace(config, checkpoint=root, checkpoint_every=4, steps=4)
    assert alone(first, config)["steps"] == 4
    start = StartWeights(checkpoint=root, step=4, policy="solver")
    grown = msgspec.structs.replace(
        config,
        checkpoint=None,
        mode=Mode.BOUNDED,
        environment=EnvironmentConfig(
            factory="reviewed", settings={"solver": "grown", "critic": "old"}
        ),
        policies={
            "grown": PolicyConfig(start=start),
            "old": PolicyConfig(start=start, frozen=True),
        },
    )
    second = tmp_path / "second"
    second.mkdir()
    with rl_job(second, grown) as job:
        job.await_step(1)
        hurt(job.worker("rollout/1"))
        outcome = job.finish()
        assert outcome.ok, outcome.message
    found = json.loads((second / "result.json").read_bytes())
    assert found["ledger"]["ok"], found["ledger"]
    assert found["policies"]["old"]["turns"] > 0
    assert [*found["rewards"]] == ["grown"]


@pytest.mark.exhaustive
def test_killed_with_its_launcher_a_job_of_several_policies_goes_on_from_its_checkpoint(
    tmp_path: Path, config: RLConfig, undisturbed: dict[str, Any]
) -> None:
    root, hold = str(tmp_path / "root"), tmp_path / "hold"
    config = msgspec.structs.replace(config, checkpoint=root, checkpoint_every=2, hold=str(hold))
    with commanded(tmp_path / "first", config) as command:
        command.job.await_step(2)
        hold.touch()
        command.job.await_event(lambda e: e["kind"] == "checkpoint_done" and e["step"] >= 2)
        command.kill_all()
    hold.unlink()
    with commanded(tmp_path / "second", config) as command:
        result = command.result()
        assert {event["tier"] for event in command.job.events("restored")} == {"checkpoint"}
    require_same(result, undisturbed)
