"""Islands that merge their weights and share their samples, at one place; one is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from island_jobs import sea
from tree import HELPERS

SCRIPT = HELPERS / "sharing_island.py"
STEPS, OWN, GROUP = 24, 2, 2


def borrowed(told: Path) -> list[str]:
    """Return the origins of the groups of others in all steps of the surviving history."""
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    surviving = dict[int, list[str]]()
    for step, origins in lines:
        surviving = {at: each for at, each in surviving.items() if at < step}
        surviving[step] = origins
    assert sorted(surviving) == list(range(STEPS))
    return [origin for each in surviving.values() for origin in each]


def judge(result: dict[str, Any], told: Path, *, other: str) -> None:
    counts = {state: count for state, count in result["ordinals"].items() if count}
    assert counts == {"trained": STEPS * OWN}
    assert result["violations"] == []
    origins = borrowed(told)
    assert origins
    assert len(origins) == len(set(origins))
    assert all(origin.startswith(f"{other}/") for origin in origins)


def test_a_run_may_be_an_island_and_share_its_samples_at_the_same_place(tmp_path: Path) -> None:
    with sea(tmp_path) as waters:
        stored = ("--checkpoint", tmp_path / "stored")
        lima = ("--told", tmp_path / "lima.told", *stored)
        waters.start("lima", *lima, "--gate", 13, tmp_path / "never", script=SCRIPT)
        waters.start("oslo", "--told", tmp_path / "oslo.told", script=SCRIPT)
        waters.until(lambda: len(waters.records("merged")) == 2)
        waters.until((tmp_path / "stored" / "step-000000000010" / "manifest.json").exists)
        waters.kill("lima")
        waters.start("lima", *lima, script=SCRIPT)
        results = waters.finish("lima", "oslo")
        assert results[0]["hash"] == results[1]["hash"]
        judge(results[0], tmp_path / "lima.told", other="oslo")
        judge(results[1], tmp_path / "oslo.told", other="lima")
        assert [len(record["parts"]) for record in waters.records("merged")] == [2] * 7
        assert [each["why"] for each in waters.records("left")] == ["done"] * 2
