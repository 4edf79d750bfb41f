"""The RL job with real processes: kills of workers and nodes do not affect its outcome."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobs import Job, hurt
from pretrained_models import saved
from rl_jobs import alone, commanded, rl_job
from sidecar_group import wait_until

from holdfast.adapters.rl.config import RLConfig, WarmStart, preset
from holdfast.adapters.rl.ledger.checker import CheckConfig
from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.plan import Mode
from holdfast.adapters.rl.ledger.replay import ReplayConfig
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.loss.ppo import LossConfig
from holdfast.adapters.rl.weights import warm_up
from holdfast.ckpt.memory.arena import ARENA_ROOT

EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RLConfig:
    warm_start = str(tmp_path_factory.mktemp("warm"))
    config = msgspec.structs.replace(preset("tiny"), steps=40, lr=3e-4, warm_start=warm_start)
    assert warm_up.prepare(config)
    assert not warm_up.prepare(config)
    return config


@pytest.fixture(scope="module")
def undisturbed(config: RLConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the outcome of the job in one process, started by hand."""
    return alone(tmp_path_factory.mktemp("alone"), config)


def logs_in(job: Job) -> set[str]:
    """Return the names of the record logs in the memory of the job's nodes."""
    names = set()
    for path in ARENA_ROOT.glob(f"holdfast-{job.launcher.run}-*/*.log"):
        with suppress(FileNotFoundError):
            head = path.read_bytes()[16:4096]
            names.add(json.loads(head[: head.index(b"}") + 1])["name"])
    return names


def test_alone_the_job_trains_every_prompt_once(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["steps"] == len(undisturbed["reward"]) == 40
    assert undisturbed["staleness_max"] == 2
    ledger = undisturbed["ledger"]
    assert ledger["ok"]
    assert {state: n for state, n in ledger["ordinals"].items() if n} == {"trained": 160}
    assert ledger["samples_accepted"] == 640


def test_alone_the_job_takes_what_arrives_within_its_limits_and_some_of_it_again(
    tmp_path: Path, config: RLConfig
) -> None:
    scheduling = Scheduling(
        order=GroupOrder.ARRIVAL,
        claims="longest",
        over_provision=1.0,
        token_budget=50,
        ledger_tokens=120,
        worker_tokens=300,
    )
    replay = ReplayConfig(policy="prioritized", share=0.25)
    result = alone(
        tmp_path,
        msgspec.structs.replace(
            config, mode=Mode.BOUNDED, steps=10, scheduling=scheduling, replay=replay
        ),
    )
    ledger = result["ledger"]
    assert ledger["ok"], ledger
    assert {state: n for state, n in ledger["ordinals"].items() if n} == {"trained": 30}
    assert result["staleness_max"] <= config.eta
    assert 0 < ledger["groups_reused"] < 10
    assert (
        sum((int(times) - 1) * n for times, n in result["replay"].items())
        == (ledger["groups_reused"])
    )


def test_kills_of_rollout_workers_and_the_leading_trainer_do_not_show_in_the_outcome(
    tmp_path: Path, config: RLConfig, undisturbed: dict[str, Any]
) -> None:
    with rl_job(tmp_path, config) as job:
        job.await_step(2)
        seat = "rollout/0"
        busy = job.await_event(
            lambda e: e["kind"] == "sampling" and e["seat"] == seat and e["samples"] > 0,
            after=len(job.history),
        )
        (dead,) = {name for name in logs_in(job) if name.startswith("rollout-0-")}
        hurt(job.worker(busy["seat"]))
        job.await_event(lambda e: e["kind"] == "rollout_recovered" and e["worker"] == seat)
        rank_0 = job.events("proposed")[-1]["ranks"][0]
        hurt(job.worker(rank_0), signal.SIGKILL)
        job.generation(2)
        wait_until(lambda: dead not in (logs_in(job) or {dead}), "the dead worker's log is dropped")
        outcome = job.finish()
        assert outcome.ok, outcome.message
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert result["final_hash"] == undisturbed["final_hash"]
    assert result["reward"] == undisturbed["reward"]
    assert result["heldout"] == undisturbed["heldout"]
    assert result["ledger"]["ok"], result["ledger"]


def test_a_model_of_transformers_is_trained(tmp_path: Path, config: RLConfig) -> None:
    pytest.importorskip("transformers")
    config = msgspec.structs.replace(config, pretrained=saved("qwen3"), warm_start=None, steps=4)
    loss = LossConfig(proximal="ewma", baseline="median")
    config = msgspec.structs.replace(config, warm=WarmStart(steps=0), loss=loss)
    result = alone(tmp_path, config)
    assert result["ledger"]["ok"], result["ledger"]
    assert (result["steps"], result["staleness_max"]) == (4, 2)


@pytest.mark.exhaustive
def test_what_needs_a_pass_over_the_batch_is_the_same_for_any_ranks_and_after_a_kill(
    tmp_path: Path, config: RLConfig
) -> None:
    loss = LossConfig(
        baseline="minimum_variance",
        correction="prefix",
        proximal="recomputed",
        staleness_discount=0.9,
        ess_lr=True,
    )
    config = msgspec.structs.replace(config, loss=loss, steps=8)
    (tmp_path / "alone").mkdir()
    expected = alone(tmp_path / "alone", config)
    check = CheckConfig(recompute_every=1, fatal=True)
    config = msgspec.structs.replace(config, check=check)
    with rl_job(tmp_path, config) as job:
        job.await_step(3)
        hurt(job.worker(job.events("proposed")[-1]["ranks"][0]), signal.SIGKILL)
        outcome = job.finish()
        assert outcome.ok, outcome.message
        rechecked = [event["difference"] for event in job.events("rechecked")]
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert result["final_hash"] == expected["final_hash"]
    assert result["reward"] == expected["reward"]
    assert len(rechecked) >= 8
    assert max(rechecked) <= 1e-5


def test_bounded_samples_are_never_too_old_through_kills_of_both_sides(
    tmp_path: Path, config: RLConfig
) -> None:
    config = msgspec.structs.replace(config, mode=Mode.BOUNDED, steps=24)
    with rl_job(tmp_path, config) as job:
        job.await_step(3)
        hurt(job.worker("rollout/1"))
        job.await_event(lambda e: e["kind"] == "rollout_recovered" and e["worker"] == "rollout/1")
        hurt(job.worker(job.events("proposed")[-1]["ranks"][0]), signal.SIGKILL)
        job.generation(2)
        outcome = job.finish()
        assert outcome.ok, outcome.message
        events = job.events("weights_pulled")
        pulled = {event["version"] for event in events}
        staleness = [event["staleness"] for event in job.events("step") if "staleness" in event]
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert result["ledger"]["ok"], result["ledger"]
    assert {state: n for state, n in result["ledger"]["ordinals"].items() if n} == {"trained": 96}
    assert result["staleness_max"] <= config.eta
    assert max(pulled) >= config.steps - 1 - config.eta, "the oldest that may sample the last step"
    assert all(event["before"] is None or event["before"] < event["version"] for event in events)
    assert result["violations"] == []
    assert all(0 <= steps <= config.eta for steps in staleness)


def spilled(disk: Path) -> bool:
    """Tell whether both nodes have spilled a snapshot of step 10 or a later one."""
    lists = [path for node in disk.glob("*") for path in node.rglob("*.json")]
    steps = {path.parent: json.loads(path.read_bytes())["step"] for path in sorted(lists)}
    return len(steps) == 2 and min(steps.values()) >= 10


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tier", ["checkpoint", pytest.param("disk", marks=EXHAUSTIVE)])
def test_killed_with_its_launcher_a_job_goes_on_from_what_is_left_as_if_nothing_had_happened(
    tmp_path: Path, config: RLConfig, undisturbed: dict[str, Any], tier: str
) -> None:
    root = tmp_path / "root"
    scheduling = Scheduling(over_provision=1.0)  # of step t + 1 nothing is sampled before t is
    config = msgspec.structs.replace(config, scheduling=scheduling)
    flags: tuple[str | Path, ...] = ("--disk", root)
    if tier == "checkpoint":
        config, flags = (
            msgspec.structs.replace(config, checkpoint=str(root), checkpoint_every=5),
            (),
        )
    with commanded(tmp_path / "first", config, *flags) as command:
        command.job.await_step(1)
        if tier == "checkpoint":
            command.job.await_event(lambda e: e["kind"] == "checkpoint_done" and e["step"] >= 10)
        else:
            wait_until(lambda: spilled(root), "a snapshot is on both nodes' disks")
        command.kill_all()
    with commanded(tmp_path / "second", config, *flags) as command:
        result = command.result()
        restored = command.job.events("restored")
        pulled = {event["version"] for event in command.job.events("weights_pulled")}
    assert {event["tier"] for event in restored} == {tier}
    (step,) = {event["step"] for event in restored}
    assert 10 <= step < config.steps
    assert step - 1 in pulled, "a version that was a snapshot of the job that is gone"
    assert result["final_hash"] == undisturbed["final_hash"]
    assert result["reward"] == undisturbed["reward"]
    assert result["heldout"] == undisturbed["heldout"]
    assert result["ledger"]["ok"], result["ledger"]


def test_a_lost_nodes_rollout_worker_leaves_its_tokens_in_the_copy_of_its_log(
    tmp_path: Path, config: RLConfig, undisturbed: dict[str, Any]
) -> None:
    hold = tmp_path / "hold"
    with rl_job(tmp_path, msgspec.structs.replace(config, hold=str(hold))) as job:
        job.await_step(2)
        (seat,) = job.launcher.processes()["c"].workers
        job.await_event(
            lambda e: e["kind"] == "sampling" and e["seat"] == seat and e["samples"] > 0,
            after=len(job.history),
        )
        hold.touch()  # a log has nothing of what was trained
        assert job.launcher.lose_machine("c")
        lost = job.await_event(lambda e: e["kind"] == "rollout_recovered" and e["worker"] == seat)
        assert lost["samples"] > 0
        hold.unlink()
        outcome = job.finish()
        assert outcome.ok, outcome.message
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert result["final_hash"] == undisturbed["final_hash"]
    assert result["ledger"]["ok"], result["ledger"]


@pytest.mark.exhaustive
def test_a_rollout_worker_whose_node_is_to_leave_hands_its_samples_over(
    tmp_path: Path, config: RLConfig, undisturbed: dict[str, Any]
) -> None:
    with rl_job(tmp_path, config) as job:
        job.await_step(2)
        node = job.launcher.processes()["c"]
        (seat,) = node.workers
        job.await_event(
            lambda e: e["kind"] == "sampling" and e["seat"] == seat and e["samples"] > 0,
            after=len(job.history),
        )
        hurt(node.agent, signal.SIGTERM)
        job.await_event(lambda e: e["kind"] == "rollout_left" and e["worker"] == seat)
        outcome = job.finish()
        assert outcome.ok, outcome.message
        assert not job.events("rollout_recovered"), "no log is read"
        assert job.events("node_exited")[0]["status"] == "left after a notice"
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert result["final_hash"] == undisturbed["final_hash"]
    assert result["ledger"]["ok"], result["ledger"]


def test_a_bad_configuration_ends_the_job_at_once_with_one_clear_sentence(
    tmp_path: Path, config: RLConfig
) -> None:
    with rl_job(tmp_path, msgspec.structs.replace(config, task="chess")) as job:
        outcome = job.finish()
        assert not outcome.ok
        assert "task 'chess' is not known" in outcome.message
        assert max(event["attempt"] for event in job.events("worker_started")) == 1
