"""Agents, launcher and toy workers as real processes that are really killed."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from jobs import DEADLINE_S, hurt, job
from ports import free_ports

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.coordinator.embedded import EmbeddedCoordinator, EmbeddedServer
from holdfast.elastic.launch.agent_start import start_agent
from holdfast.elastic.membership.view import node_key
from holdfast.tools.leftovers import leftovers
from holdfast.tools.live.asking import ask

LONG = ("--steps", "1000000")


def report(capsys: pytest.CaptureFixture[str], what: str, seconds: float) -> None:
    with capsys.disabled():
        print(f"\n  {what}: new generation after {seconds * 1000:.0f} ms")


def test_a_job_runs_to_its_end(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        outcome = running.finish()
        assert outcome.ok and outcome.result == {"steps": 20}
        assert len(running.events("proposed")) == 1
        exits = running.events("worker_exited")
        assert [event["status"] for event in exits] == ["exit status 0"] * 2


def test_survivors_go_on_and_a_replacement_joins_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job(tmp_path, *LONG, per_node=3) as running:
        running.await_step(5)
        survivor = running.worker("trainer/0")
        killed = hurt(running.worker("trainer/2"))
        smaller = running.world_of(2)
        report(capsys, "SIGKILL of a worker", running.generation(2)["time_s"] - killed)
        assert smaller["ranks"] == ["trainer/0", "trainer/1"]
        running.world_of(3, after=running.history.index(smaller))
        assert running.worker("trainer/0") == survivor
        assert running.events("detected")[0]["why"] == "killed by SIGKILL"


def test_a_stopped_worker_is_a_dead_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with job(tmp_path, *LONG) as running:
        running.await_step(5)
        stopped = hurt(running.worker("trainer/1"), signal.SIGSTOP)
        report(capsys, "SIGSTOP of a worker", running.generation(2)["time_s"] - stopped)
        assert running.events("detected")[0]["what"] == "stopped"


def test_a_worker_stopped_for_a_moment_goes_on(tmp_path: Path) -> None:
    timing = {"stop_grace_s": 3.0}
    with job(tmp_path, "--steps", "40", timing=timing) as running:
        running.await_step(2)
        pid = running.worker("trainer/1")
        hurt(pid, signal.SIGSTOP)
        hurt(pid, signal.SIGCONT)
        assert running.finish().ok
        assert running.events("detected") == []


@pytest.mark.parametrize("how", ["soft", "hard"])
def test_a_hung_worker_is_ended_after_it_said_where_it_stands(tmp_path: Path, how: str) -> None:
    timing = {"min_hang_s": 1.5}
    with job(tmp_path, "--hang", how, *LONG, timing=timing) as running:
        resumed = running.generation(2)
        found = running.events("detected")[0]
        assert (found["what"], found["victim"]) == ("hang", "trainer/0")
        assert re.search(r"in step 3, \S+ s are allowed", found["why"])
        stack = running.events("stack")[0]
        assert (stack["seat"], stack["how"]) == ("trainer/0", "faulthandler")
        where = "in hang" if how == "soft" else "in match"
        assert where in stack["at"]
        assert "in run_generation" in stack["text"]
        assert resumed["time_s"] > found["time_s"]


def test_an_announced_pause_has_a_limit_of_its_own(tmp_path: Path) -> None:
    with job(tmp_path, "--hang", "paused", *LONG) as running:
        running.generation(2)
        found = running.events("detected")[0]
        assert "1.5 s are allowed" in found["why"]


def test_ranks_that_wait_for_each_other_begin_anew_with_the_same_workers(tmp_path: Path) -> None:
    timing = {"min_hang_s": 1.5, "first_hang_s": 1.5}
    with job(tmp_path, "--hang", "meet", *LONG, nodes=2, per_node=1, timing=timing) as running:
        resumed = running.generation(2)
        seen = [e["what"] for e in running.events("detected") if e["time_s"] < resumed["time_s"]]
        assert seen == ["stall"]
        assert (
            len([e for e in running.events("worker_started") if e["time_s"] < resumed["time_s"]])
            == 2
        )
        said = {event["seat"]: event["text"] for event in running.events("stack")}
        assert set(said) == {"trainer/0", "trainer/1"}
        assert all("in run_generation" in text for text in said.values())


def test_ranks_that_always_wait_for_each_other_end_the_job(tmp_path: Path) -> None:
    timing = {"min_hang_s": 1.0, "first_hang_s": 1.0}
    with job(tmp_path, "--hang", "always", timing=timing, max_attempts=3) as running:
        outcome = running.finish()
        assert not outcome.ok
        assert "wait for each other, for the 3. time" in outcome.message


def test_a_straggler_is_named_in_the_events_and_in_the_status(tmp_path: Path) -> None:
    with job(tmp_path, *LONG, "--slow", "1", nodes=3, per_node=1) as running:
        found = running.await_event(lambda e: e["kind"] == "straggler")
        assert (found["victim"], found["on"], found["computes"]) == ("trainer/1", "n1", False)
        assert "takes 5.0 times as long as the others for a microbatch" in found["why"]
        troubles: list[str] = []
        deadline_s = time.monotonic() + DEADLINE_S
        while not troubles and time.monotonic() < deadline_s:
            troubles = [each for node in ask(tmp_path / "run") for each in node.troubles()]
        assert found["why"] in troubles


def test_a_survivor_in_a_long_microbatch_is_waited_for(tmp_path: Path) -> None:
    timing = {"park_timeout_s": 0.05}
    with job(tmp_path, *LONG, "--seconds", "0.5", timing=timing) as running:
        running.await_step(2)
        survivor = running.worker("trainer/0")
        hurt(running.worker("trainer/1"))
        running.generation(2)
        assert running.worker("trainer/0") == survivor
        seen = [event["what"] for event in running.events("detected")]
        assert [what for what in seen if what != "join"] == ["exit"]


def test_a_job_outlives_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with job(tmp_path, *LONG, nodes=3, per_node=1) as running:
        running.await_step(5)
        killed = time.time()
        assert running.launcher.lose_machine("n1")
        smaller = running.world_of(2)
        report(capsys, "SIGKILL of a node", running.generation(2)["time_s"] - killed)
        assert smaller["ranks"] == ["trainer/0", "trainer/2"]
        assert not list(Path("/dev/shm").glob(f"holdfast-{running.launcher.run}-n1"))


def test_a_stopped_agent_is_a_dead_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with job(tmp_path, *LONG, nodes=2, per_node=1) as running:
        running.await_step(5)
        stopped = hurt(running.launcher.processes()["n0"].agent, signal.SIGSTOP)
        report(capsys, "SIGSTOP of an agent", running.generation(2)["time_s"] - stopped)


def test_the_only_node_is_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with job(tmp_path, *LONG, node_restarts=1) as running:
        running.await_step(5)
        killed = hurt(running.launcher.processes()["n0"].agent)
        report(capsys, "SIGKILL of the only agent", running.generation(2)["time_s"] - killed)


def test_the_loss_of_the_last_node_ends_the_job(tmp_path: Path) -> None:
    with job(tmp_path, *LONG, node_restarts=0) as running:
        running.await_step(2)
        hurt(running.launcher.processes()["n0"].agent)
        outcome = running.finish()
        assert not outcome.ok
        assert "every node is lost: n0 (killed by SIGKILL)" in outcome.message


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sidecar_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    with job(tmp_path, *LONG) as running:
        running.await_step(5)
        before = running.launcher.processes()["n0"]
        hurt_at = hurt(before.sidecar, number)
        report(capsys, f"{number.name} of a sidecar", running.generation(2)["time_s"] - hurt_at)
        after = running.launcher.processes()["n0"]
        assert after.sidecar not in (0, before.sidecar)
        assert after.workers == before.workers


def test_a_script_that_always_crashes_ends_the_job(tmp_path: Path) -> None:
    with job(tmp_path, "--crash", per_node=1, max_attempts=3) as running:
        outcome = running.finish()
        assert not outcome.ok
        assert "trainer/0 failed 3 times in a row" in outcome.message
        assert "ValueError: this script always crashes" in outcome.message
        assert len(running.events("worker_started")) == 3


def test_a_user_error_is_not_retried(tmp_path: Path) -> None:
    with job(tmp_path, "--user-error", per_node=1) as running:
        outcome = running.finish()
        assert outcome.message == "checkpoint x is of another model: choose another"
        assert len(running.events("worker_started")) == 1


def test_a_failure_after_the_last_step_is_a_failure(tmp_path: Path) -> None:
    with job(tmp_path, "--late", per_node=1) as running:
        outcome = running.finish()
        assert not outcome.ok
        assert "trainer/0 completed its part of the job and then ended with exit status 7" in (
            outcome.message
        )


def test_other_roles_live_beside_the_generations(tmp_path: Path) -> None:
    with job(tmp_path, *LONG, roles={"rollout": 1}) as running:
        running.await_step(2)
        rollout = running.worker("rollout/0")
        hurt(running.worker("trainer/1"))
        running.generation(2)
        assert running.worker("rollout/0") == rollout
        started = len(running.events("proposed"))
        hurt(rollout)
        running.await_event(
            lambda e: (
                e["kind"] == "worker_started" and e["seat"] == "rollout/0" and e["attempt"] > 1
            )
        )
        running.world_of(2, after=0)
        assert len(running.events("proposed")) <= started + 1


def test_a_stopped_agent_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with job(tmp_path, *LONG) as running:
        running.await_step(2)
        running.launcher.stop("enough")
        hurt(running.launcher.processes()["n0"].agent, signal.SIGSTOP)
        assert running.finish().message == "enough"


def alone(folder: Path, key: RunKey, *, coordinator: str) -> AgentConfig:
    """Return the configuration of an agent that no launcher looks after."""
    key.save(folder / "key.json")
    return AgentConfig(
        run=f"alone-{os.getpid()}-{folder.name}",
        node="n0",
        domain="n0",
        run_dir=str(folder),
        key_file=str(folder / "key.json"),
        coordinator=coordinator,
        slots={},
        wanted={},
        nodes=1,
        command=("true",),
    )


def test_an_agent_waits_for_a_slow_coordinator_as_long_as_its_launcher_lives(
    tmp_path: Path,
) -> None:
    key = RunKey.new()
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    config = alone(tmp_path, key, coordinator=address)
    read, write = os.pipe()
    said = tmp_path / "output"
    agent = start_agent(config, env=os.environ, stdin=read, output=said)
    try:
        assert agent.wait(2.5) is None, said.read_text()
        server = EmbeddedServer(key, bind=address)
        coordinator = EmbeddedCoordinator(server.address, key)
        deadline_s = time.monotonic() + DEADLINE_S
        while coordinator.get(node_key(config.run, "n0")) is None:
            assert time.monotonic() < deadline_s, said.read_text()
            time.sleep(0.02)
    finally:
        os.close(write)
        code = agent.wait(DEADLINE_S)
        os.close(read)
    coordinator.close()
    server.close()
    assert (code, said.read_text()) == (1, "")
    assert leftovers(f"holdfast-{config.run}-n0", timeout_s=DEADLINE_S) == [], (
        "the sidecar was just being started"
    )


def test_an_agent_whose_launcher_ended_first_ends_without_a_word(tmp_path: Path) -> None:
    config = alone(tmp_path, RunKey.new(), coordinator="tcp://127.0.0.1:1")
    said = tmp_path / "output"
    read, write = os.pipe()
    os.close(write)
    agent = start_agent(config, env=os.environ, stdin=read, output=said)
    os.close(read)
    assert agent.wait(DEADLINE_S) == 1
    assert said.read_text() == ""
