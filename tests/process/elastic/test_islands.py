"""Islands: runs far apart train one model, and what becomes of it is what the logbook says."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from island_jobs import SCRIPT, sea
from jobs import Job, hurt, launched, trainers

import holdfast
from holdfast.ckpt.transport import RunKey
from holdfast.tools.cli import main

TWO = ("--founders", 2)
NAMES = ("bari", "lima", "oslo")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of two islands that nothing disturbs, and the folder of their sea."""
    with sea(tmp_path_factory.mktemp("quiet")) as waters:
        for name in ("lima", "oslo"):
            waters.start(name, *TWO)
        first, second = waters.finish("lima", "oslo")
        assert first["hash"] == second["hash"]
        return {"hash": first["hash"], "meet": waters.meet, "merged": waters.records("merged")}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the weights of three islands that nothing disturbs."""
    with sea(tmp_path_factory.mktemp("three")) as waters:
        for name in NAMES:
            waters.start(name, "--founders", 3)
        (found,) = {result["hash"] for result in waters.finish(*NAMES)}
        return str(found)


def test_islands_end_with_equal_weights_which_the_last_one_saves(quiet: dict[str, Any]) -> None:
    assert [len(record["parts"]) for record in quiet["merged"]] == [2] * 7
    steps = sorted(each.name for each in (quiet["meet"] / "weights").iterdir())
    assert steps == ["step-000000000024"]


def _lose(job: Job, seat: str) -> None:
    """Kill a worker at the gate, and wait for the next generation."""
    job.await_step(13)
    hurt(job.worker(seat))
    job.await_event(lambda e: e["kind"] == "reformed" and e["generation"] > 1)


def test_two_sharded_ranks_that_lose_a_worker_and_a_node_are_an_island_like_one_rank(
    tmp_path: Path, quiet: dict[str, Any]
) -> None:
    """The node has a notice while the island waits for the work of the other: it waits no more."""
    with sea(tmp_path) as waters:
        gate, other_gate = tmp_path / "gate", tmp_path / "other gate"
        flags = waters.flags("lima", *TWO, "--fsdp", "--parity", 1, "--gate", 13, gate)
        RunKey.new().save(tmp_path / "sea.key")
        apart = ("--line", "1Mbit/s", "--key", str(tmp_path / "sea.key"))
        flags += apart
        config = trainers(SCRIPT, flags, run_dir=tmp_path / "run", nodes=2)
        waters.start("oslo", *TWO, *apart, "--gate", 13, other_gate)
        with launched(config) as job:
            _lose(job, "trainer/1")
            gate.touch()
            job.await_event(
                lambda e: e["kind"] == "restored" and e["rank"] == 1 and e["generation"] > 1
            )
            hurt(job.launcher.processes()["n1"].agent, signal.SIGTERM)
            job.await_event(lambda e: e["kind"] == "node_exited" and e["victim"] == "n1")
            handed = job.events("handed_over")
            assert [event["seat"] for event in handed] == ["trainer/1"]
            assert handed[0]["step"] <= 18
            other_gate.touch()
            assert job.finish().ok
            sent, adopted = job.events("tide_published"), job.events("tide_adopted")
            assert all(each["seconds"] > 0 for each in sent)
            assert all(each["bytes"] and each["seconds"] > 0 for each in adopted)
            assert any(each["direct_bytes"] for each in adopted)
        (other,) = waters.finish("oslo")
        found = json.loads(waters.result("lima").read_text())
        assert found["hash"] == other["hash"] == quiet["hash"]


def test_an_island_that_goes_back_to_a_checkpoint_ends_with_the_same_weights(
    tmp_path: Path, quiet: dict[str, Any]
) -> None:
    with sea(tmp_path) as waters:
        stored = ("--checkpoint", tmp_path / "stored", "--checkpoint-every", 7)
        waters.start("oslo", *TWO)
        waters.start("lima", *TWO, *stored, "--gate", 13, tmp_path / "never")
        waters.until(lambda: len(waters.records("merged")) == 2)
        waters.until((tmp_path / "stored" / "step-000000000007" / "manifest.json").exists)
        waters.kill("lima")
        waters.start("lima", *TWO, *stored)
        first, second = waters.finish("lima", "oslo")
        assert first["hash"] == second["hash"] == quiet["hash"]
        assert "entered" not in [each["kind"] for each in waters.records()[3:]]


@pytest.mark.exhaustive  # a peer that dies is in test_haul, and simulated islands die at all times
def test_a_payload_outlives_all_processes_of_its_island(
    tmp_path: Path, quiet: dict[str, Any]
) -> None:
    with sea(tmp_path) as waters:
        RunKey.new().save(tmp_path / "sea.key")
        keyed, gate = (*TWO, "--key", tmp_path / "sea.key"), tmp_path / "gate"
        stored = ("--checkpoint", tmp_path / "stored", "--checkpoint-every", 7)
        waters.start("oslo", *keyed, "--gate", 11, gate)
        waters.start("lima", *keyed, *stored, "--gate", 13, tmp_path / "never")
        waters.until((tmp_path / "stored" / "step-000000000007" / "manifest.json").exists)
        waters.until(lambda: bool(list((waters.meet / "works/lima").glob("*-00000002-*.json"))))
        waters.kill("lima")
        gate.touch()
        sign = waters.meet / "alive/oslo.json"
        waters.until(lambda: json.loads(sign.read_text())["tide"] == 3)
        waters.start("lima", *keyed, *stored)
        first, second = waters.finish("lima", "oslo")
        assert first["hash"] == second["hash"] == quiet["hash"]


def test_an_island_that_lost_its_state_is_given_the_sea_s_weights(tmp_path: Path) -> None:
    with sea(tmp_path) as waters:
        waters.start("oslo", *TWO)
        waters.start("lima", *TWO, "--gate", 13, tmp_path / "never")
        waters.until(lambda: len(waters.records("merged")) == 2)
        waters.kill("lima")
        waters.start("lima", *TWO, "--steps", 16)
        waters.finish("lima", "oslo")
        left = waters.records("left")[0]
        assert (left["island"], left["why"]) == ("lima", "lost")
        *_, back = waters.records("entered")
        assert (back["island"], back["lineage"]) == ("lima", back["number"])
        assert back["tide"] >= 2
        after = [each for each in waters.records("merged") if each["number"] > back["number"]]
        assert "lima" in [part["island"] for each in after for part in each["parts"]]
        assert list((waters.meet / "asked").iterdir()) == []


def test_an_island_whose_loss_guard_goes_back_sends_none_of_the_faults(
    tmp_path: Path, quiet: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two are in weights that a tide would send, not finite and finite; one is in a loss alone."""
    with sea(tmp_path) as waters:
        faults = ("--fault", 7, "nan", "--fault", 11, "1e3", "--fault", 17, "loss")
        waters.start("lima", *TWO, "--guard", 2, *faults)
        stored = ("--checkpoint", tmp_path / "stored", "--checkpoint-every", 7)
        waters.start("oslo", *TWO, *stored)
        first, second = waters.finish("lima", "oslo")
        assert (first["generation"], second["generation"]) == (4, 1)
        assert first["hash"] == second["hash"] == quiet["hash"]
        assert [each["kind"] for each in waters.records() if each["kind"] != "merged"] == [
            "founded",
            *["entered"] * 2,
            *["left"] * 2,
        ]
        from_step = ("--from", str(tmp_path / "stored"), "--step", "7", "--json")
        assert main(["islands", "replay", "--sea", str(waters.meet), *from_step]) == 0
        again = json.loads(capsys.readouterr().out)
        assert [each["outcome"] for each in again["merges"]] == ["earlier"] + ["verified"] * 6


@pytest.mark.exhaustive  # the simulated seas have silent islands too
def test_a_silent_island_is_put_out_and_comes_back_with_its_work(tmp_path: Path) -> None:
    with sea(tmp_path) as waters:
        gate = tmp_path / "gate"
        waters.start("oslo", *TWO, "--patience", 5, "--gate", 15, gate)
        waters.start("lima", *TWO, "--patience", 5, "--gate", 13, gate)
        waters.until(lambda: len(waters.records("merged")) == 2)
        os.kill(waters.pid("lima"), signal.SIGSTOP)
        waters.until(lambda: bool(waters.records("left")))
        gate.touch()
        waters.until(lambda: len(waters.records("merged")) >= 3)
        os.kill(waters.pid("lima"), signal.SIGCONT)
        waters.finish("lima", "oslo")
        entered = waters.records("entered")
        first = next(each for each in entered if each["island"] == "lima")
        assert (entered[2]["island"], entered[2]["lineage"]) == ("lima", first["number"])


@pytest.mark.exhaustive  # the simulated seas have quorums too
def test_with_a_quorum_slow_and_late_islands_take_part(tmp_path: Path) -> None:
    with sea(tmp_path) as waters:
        gate, half = tmp_path / "gate", ("--quorum", 0.5)
        waters.start("fast", *half, *TWO, "--steps", 40, "--pace", 0.05, "--gate", 9, gate)
        waters.start("slow", *half, *TWO, "--pace", 0.2)
        waters.until(lambda: len(waters.records("merged")) >= 1)
        waters.start("late", *half, "--steps", 16)
        waters.until((waters.meet / "asked" / "late.json").exists)
        gate.touch()
        waters.finish("fast", "slow", "late")
        *_, late = waters.records("entered")
        assert (late["island"], late["lineage"]) == ("late", late["number"])
        assert late["tide"] >= 1
        named = {part["island"] for each in waters.records("merged") for part in each["parts"]}
        assert named == {"fast", "slow", "late"}


@pytest.mark.exhaustive  # the simulated seas have islands of different speeds too
def test_a_slow_island_takes_fewer_steps_to_a_tide(tmp_path: Path) -> None:
    by_speed = (*TWO, "--every", 24, "--least-every", 4)
    with sea(tmp_path) as waters:
        waters.start("fast", *by_speed, "--steps", 96, "--pace", 0.2)
        waters.start("slow", *by_speed, "--steps", 24, "--pace", 1.2)
        waters.finish("fast", "slow")
        merged = [each for each in waters.records("merged") if len(each["parts"]) == 2]
        weights = [[part["weight"] for part in each["parts"]] for each in merged]
        assert weights[0] == [96, 96], "nobody knows the speeds yet"
        fast, slow = (sum(each) for each in zip(*weights[3:6], strict=True))
        assert fast > 1.5 * slow
        assert all(part["step_us"] for each in merged[:2] for part in each["parts"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
def test_three_islands_of_two_ranks_that_lose_workers_end_as_undisturbed_ones(
    tmp_path: Path, three: str, seed: int
) -> None:
    random = Random(seed)
    with sea(tmp_path) as waters, ExitStack() as jobs:
        gate = tmp_path / "gate"
        running = []
        for name in NAMES:
            flags = ["--founders", 3, "--fsdp", "--parity", 1, "--gate", 13, gate]
            config = trainers(
                SCRIPT, waters.flags(name, *flags), run_dir=tmp_path / f"run-{name}", nodes=2
            )
            running.append(jobs.enter_context(launched(config)))
        for job in random.sample(running, 2):
            _lose(job, f"trainer/{random.randrange(2)}")
        gate.touch()
        assert all(job.finish().ok for job in running)
        hashes = {json.loads(waters.result(name).read_text())["hash"] for name in NAMES}
        assert hashes == {three}


def _kill_whole(job: Job) -> None:
    """Kill all processes of all nodes of an island at once."""
    for node in job.launcher.processes().values():
        for pid in (node.agent, node.sidecar, *node.workers.values()):
            with suppress(ProcessLookupError):
                hurt(pid)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(20))
def test_three_islands_of_two_ranks_that_are_killed_whole_end_as_undisturbed_ones(
    tmp_path: Path, three: str, seed: int
) -> None:
    """One goes on from the memory of its nodes; one loses that too, and has its checkpoints."""
    random = Random(seed)
    with sea(tmp_path) as waters, ExitStack() as jobs:
        gate, running = tmp_path / "gate", dict[str, Job]()

        def start(name: str, run: str) -> None:
            stored = ("--checkpoint", tmp_path / name, "--checkpoint-every", 3)
            flags = ("--founders", 3, "--fsdp", "--parity", 1, "--gate", 13, gate, *stored)
            words = waters.flags(name, *flags)
            config = trainers(SCRIPT, words, run_dir=tmp_path / run / name, nodes=2)
            running[name] = jobs.enter_context(launched(config))

        for name in NAMES:
            start(name, "first")
        killed, lost = random.sample(NAMES, 2)
        running[killed].await_step(random.randrange(1, 14))
        _kill_whole(running[killed])
        waters.until((tmp_path / lost / "step-000000000003" / "manifest.json").exists)
        running[lost].await_step(random.randrange(3, 14))
        running[lost].launcher.kill()
        _kill_whole(running[lost])
        assert running[lost].finish().ok is False
        start(lost, "again")
        running[killed].await_event(lambda e: e["kind"] == "restored")
        running[lost].await_event(lambda e: e["kind"] == "restored")
        gate.touch()
        assert all(job.finish().ok for job in running.values())
        hashes = {json.loads(waters.result(name).read_text())["hash"] for name in NAMES}
        assert hashes == {three}
        assert [each["kind"] for each in waters.records()[1:4]] == ["entered"] * 3
        assert len(waters.records("entered")) == 3, "nobody began anew"


def test_what_does_not_fit_the_sea_is_refused_by_name(
    tmp_path: Path, quiet: dict[str, Any]
) -> None:
    with sea(tmp_path) as waters:
        waters.meet = quiet["meet"]
        waters.start("a", "--bits", 8)
        status, said = waters.exit("a")
        assert status
        assert "bits is 8 here and 4 in the sea" in said


def test_the_public_names_are_those_of_the_settings() -> None:
    assert holdfast.Islands().wait == "all"
    assert holdfast.Islands(wait=holdfast.Quorum(0.8, grace_s=5)).outer == holdfast.Nesterov()
