"""Islands: runs far apart train one model, and what becomes of it is what the logbook says."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from island_jobs import SCRIPT, Sea, sea
from jobs import hurt, launched, trainers

import holdfast

TWO = ("--founders", 2)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of two islands that nothing disturbs, and the folder of their sea."""
    with sea(tmp_path_factory.mktemp("quiet")) as waters:
        for name in ("lima", "oslo"):
            waters.start(name, *TWO)
        first, second = waters.finish("lima", "oslo")
        assert first["hash"] == second["hash"]
        return {"hash": first["hash"], "meet": waters.meet, "merged": waters.records("merged")}


def test_islands_end_with_equal_weights_which_the_last_one_saves(quiet: dict[str, Any]) -> None:
    assert [len(record["parts"]) for record in quiet["merged"]] == [2] * 7
    steps = sorted(each.name for each in (quiet["meet"] / "weights").iterdir())
    assert steps == ["step-000000000024"]


def test_two_sharded_ranks_that_lose_a_worker_are_an_island_like_one_rank(
    tmp_path: Path, quiet: dict[str, Any]
) -> None:
    with sea(tmp_path) as waters:
        gate = tmp_path / "gate"
        flags = waters.flags("lima", *TWO, "--fsdp", "--parity", 1, "--gate", 13, gate)
        config = trainers(SCRIPT, flags, run_dir=tmp_path / "run", nodes=2)
        waters.start("oslo", *TWO)
        with launched(config) as job:
            job.await_step(13)
            hurt(job.worker("trainer/1"))
            job.generation(2)
            gate.touch()
            assert job.finish().ok
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


def _said(waters: Sea, name: str, *flags: object) -> str:
    waters.start(name, *flags)
    status, said = waters.exit(name)
    assert status != 0
    return said


def test_what_does_not_fit_the_sea_is_refused_by_name(
    tmp_path: Path, quiet: dict[str, Any]
) -> None:
    with sea(tmp_path) as waters:
        waters.meet = quiet["meet"]
        waters.start("a", "--bits", 8)
        waters.start("b")
        waters.start("c", "--name", "")
        said = {name: waters.exit(name) for name in "abc"}
        assert all(status for status, _ in said.values())
        assert "bits is 8 here and 4 in the sea" in said["a"][1]
        assert "no island any more that could give its weights" in said["b"][1]
        assert "Islands(name=''): an island needs a name and a meeting place" in said["c"][1]


def test_the_public_names_are_those_of_the_settings() -> None:
    assert holdfast.Islands().wait == "all"
    assert holdfast.Islands(wait=holdfast.Quorum(0.8, grace_s=5)).outer == holdfast.Nesterov()
