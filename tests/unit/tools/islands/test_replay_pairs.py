"""Meetings of islands in pairs, made once more."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.written_pairs import ISLANDS, WrittenPairs
from doubles.written_seas import PARAMETERS
from replays import replayed, zeros

from holdfast.tools import cli


def outcomes(found: dict[str, Any]) -> Counter[str]:
    return Counter(each["outcome"] for each in found["merges"])


@pytest.fixture
def sea(tmp_path: Path) -> WrittenPairs:
    made = WrittenPairs(tmp_path / "sea")
    for _ in range(4):
        made.meet()
    return made


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A checkpoint of the first weights."""
    return zeros(tmp_path / "first")


def test_meetings_repeated_from_the_first_weights_have_the_digests_that_islands_state(
    sea: WrittenPairs, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = replayed(sea.store, capsys, "--from", first)
    assert (code, found["weights_equal"]) == (0, None)
    assert outcomes(found) == {"verified": 4, "repeated": 4}
    sea.end()
    code, found = replayed(sea.store, capsys, "--from", first)
    assert (code, found["weights_equal"]) == (0, True)
    assert outcomes(found) == {"verified": 8}


def test_the_last_merge_is_repeated_from_the_payloads_alone(
    sea: WrittenPairs, capsys: pytest.CaptureFixture[str]
) -> None:
    sea.end()
    code, found = replayed(sea.store, capsys)
    assert (code, found["weights_equal"]) == (0, True)
    assert outcomes(found) == {"no weights": 8}
    zeros(Path(sea.store.where("weights")), step=25)
    code, found = replayed(sea.store, capsys)
    assert (code, found["weights_equal"]) == (1, False)


def test_a_result_that_differs_from_the_one_that_is_stated_is_found(
    sea: WrittenPairs, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leaf = sea.truth["lyon"].weights[PARAMETERS[0].name]
    assert isinstance(leaf, torch.Tensor)
    leaf.view(-1)[0] += 1  # as damaged memory would
    sea.meet()
    sea.meet()
    code, found = replayed(sea.store, capsys, "--from", first)
    assert code == 1
    (wrong,) = [each for each in found["merges"] if each["outcome"] == "differs"]
    assert "lyon" in wrong["islands"]
    assert "lyon states the digest" in wrong["why"]


def test_payloads_that_are_gone_or_damaged_are_named(
    sea: WrittenPairs, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meeting = json.loads((Path(sea.store.root) / "logbook" / "00000004.json").read_text())
    part = meeting["parts"][0]
    path = Path(sea.store.root) / "payloads" / part["island"] / part["digest"]
    data = path.read_bytes()
    path.unlink()
    code, found = replayed(sea.store, capsys, "--from", first)
    assert (code, found["merges"][0]["outcome"]) == (0, "no payload")
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    code, found = replayed(sea.store, capsys, "--from", first)
    assert (code, found["merges"][0]["outcome"]) == (1, "damaged")


def test_the_status_shows_that_islands_meet_in_pairs(
    sea: WrittenPairs, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["islands", "status", "--sea", str(sea.store.root), "--listen", "0.01"]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["topology"], found["tide"]) == ("pairs", 4)
    assert found["received_bytes"] == found["sent_bytes"] > 0
    assert sorted(found["waits_for"]) == list(ISLANDS)
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "they meet in pairs" in said
    assert "from its partner" in said.replace("\n", " ")
