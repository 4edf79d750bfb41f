"""`holdfast islands` for a real sea: while it waits, when all have left, and damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from island_jobs import DEADLINE_S, Sea, sea
from tree import ROOT

TWO = ("--founders", 2)


def islands(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.tools.cli", "islands", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
        check=False,
    )


def found(*words: object, code: int = 0) -> dict[str, Any]:
    done = islands(*words, "--json")
    assert done.returncode == code, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sea, dict[str, Any]]]:
    """A sea that all islands have left, and its status while one waited for the other."""
    with sea(tmp_path_factory.mktemp("islands")) as waters:
        gate, stored = waters.folder / "gate", waters.folder / "stored"
        saving = ("--checkpoint", stored, "--checkpoint-every", 7)
        waters.start("oslo", *TWO, *saving)
        waters.start("lima", *TWO, "--gate", 11, gate)
        works = waters.meet / "works" / "oslo"
        waters.until(lambda: any(works.glob("*-00000002-0000.json")))
        waiting = found("status", "--sea", waters.meet)
        gate.touch()
        waters.finish("lima", "oslo")
        yield waters, waiting


def test_a_sea_that_waits_says_for_whom(ended: tuple[Sea, dict[str, Any]]) -> None:
    _, waiting = ended
    assert (waiting["tide"], waiting["waits_for"]) == (2, ["lima"])
    assert {each["island"] for each in waiting["members"]} == {"lima", "oslo"}
    steps = {each["island"]: each["sign"]["step"] for each in waiting["members"]}
    assert steps["lima"] <= 11
    work = {each["island"]: each["work_bytes"] for each in waiting["members"]}
    assert work["lima"] is None
    assert 0 < work["oslo"] <= waiting["sent_bytes"]
    assert waiting["elements"] == 8 * 20 + 20 + 20 * 17 + 17 + 17 + 1


def test_a_sea_that_all_have_left_says_so(ended: tuple[Sea, dict[str, Any]]) -> None:
    waters, _ = ended
    done = islands("status", "--sea", waters.meet, "--listen", "0.1", "--watch")
    assert done.returncode == 0, done.stderr
    assert "7 merges; all have left" in done.stdout
    assert done.stdout.count("its run is over") == 2


def test_a_replay_from_a_checkpoint_ends_with_the_weights_that_the_islands_left(
    ended: tuple[Sea, dict[str, Any]],
) -> None:
    waters, _ = ended
    again = found("replay", "--sea", waters.meet, "--from", waters.folder / "stored", "--step", "7")
    outcomes = [each["outcome"] for each in again["merges"]]
    assert outcomes == ["earlier"] + ["verified"] * 6
    assert again["weights_equal"] is True


def test_a_payload_that_was_changed_is_found(ended: tuple[Sea, dict[str, Any]]) -> None:
    waters, _ = ended
    part = waters.records("merged")[5]["parts"][0]
    path: Path = waters.meet / "payloads" / part["island"] / part["digest"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        again = found("replay", "--sea", waters.meet, code=1)
    finally:
        path.write_bytes(whole)
    assert [each["outcome"] for each in again["merges"]].count("damaged") == 1
    assert again["merges"][5]["outcome"] == "damaged"
