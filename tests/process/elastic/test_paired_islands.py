"""Islands that meet in pairs: nobody hears from all, and all end with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from island_jobs import SCRIPT, Sea, sea
from jobs import hurt, launched, trainers

NAMES = ("bari", "lima", "lyon", "oslo")
PAIRS = ("--topology", "pairs", "--founders", 4)


def _met(waters: Sea) -> dict[str, dict[str, Any]]:
    """Return the meetings, by tide and islands."""
    found = {}
    for record in waters.records("merged"):
        islands = " ".join(part["island"] for part in record["parts"])
        found[f"{record['tide']} {islands}"] = {**record, "number": 0}
    return found


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of four islands that nothing disturbs, and their meetings."""
    with sea(tmp_path_factory.mktemp("quiet")) as waters:
        for name in NAMES:
            waters.start(name, *PAIRS)
        (found,) = {result["hash"] for result in waters.finish(*NAMES)}
        return {"hash": found, "met": _met(waters), "meet": waters.meet}


def test_islands_that_meet_in_pairs_end_with_equal_weights(quiet: dict[str, Any]) -> None:
    tides = [record["tide"] for record in quiet["met"].values()]
    assert sorted(tides) == [tide for tide in range(5) for _ in range(2)]
    assert all(len(record["parts"]) == 2 for record in quiet["met"].values())
    steps = sorted(each.name for each in (quiet["meet"] / "weights").iterdir())
    assert steps == ["step-000000000024"]


@pytest.mark.exhaustive  # simulated seas of pairs lose islands too, and others are killed
def test_an_island_of_sharded_ranks_that_is_killed_and_one_that_goes_back_change_no_bit(
    tmp_path: Path, quiet: dict[str, Any]
) -> None:
    with sea(tmp_path) as waters:
        gate, stored = tmp_path / "gate", tmp_path / "stored"
        saved = ("--checkpoint", stored, "--checkpoint-every", 7)
        flags = waters.flags("lima", *PAIRS, "--fsdp", "--parity", 1, "--gate", 13, gate)
        config = trainers(SCRIPT, flags, run_dir=tmp_path / "run", nodes=2)
        waters.start("bari", *PAIRS)
        waters.start("lyon", *PAIRS)
        waters.start("oslo", *PAIRS, *saved, "--gate", 13, tmp_path / "never")
        with launched(config) as job:
            job.await_step(13)
            hurt(job.worker("trainer/1"))
            job.await_event(lambda e: e["kind"] == "reformed" and e["generation"] > 1)
            waters.until(lambda: len(waters.records("merged")) >= 4)
            waters.until((stored / "step-000000000007" / "manifest.json").exists)
            waters.kill("oslo")
            waters.start("oslo", *PAIRS, *saved)
            gate.touch()
            assert job.finish().ok
        results = waters.finish("bari", "lyon", "oslo")
        found = json.loads(waters.result("lima").read_text())
        assert {found["hash"], *(each["hash"] for each in results)} == {quiet["hash"]}
        assert _met(waters).keys() == quiet["met"].keys()
        assert [each["why"] for each in waters.records("left")] == ["done"] * 4
