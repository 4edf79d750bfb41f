"""The merges of a logbook, made once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.written_seas import PARAMETERS, WrittenSea
from replays import replayed, zeros

from holdfast import ckpt
from holdfast.elastic.sea.records import Merged
from holdfast.tools import cli
from holdfast.tools.islands.glance import records_of
from holdfast.tools.islands.tables import ranges


def outcomes(found: dict[str, Any]) -> list[str]:
    return [each["outcome"] for each in found["merges"]]


def merges(sea: WrittenSea) -> list[Merged]:
    return [each for each in records_of(sea.store) if isinstance(each, Merged)]


@pytest.fixture
def sea(tmp_path: Path) -> WrittenSea:
    made = WrittenSea(tmp_path / "sea")
    for _ in range(5):
        made.merge()
    return made


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A checkpoint of the first weights."""
    return zeros(tmp_path / "first")


def test_merges_repeated_from_the_first_weights_have_the_digests_that_islands_state(
    sea: WrittenSea, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = replayed(sea.store, capsys, "--from", first)
    assert code == 0
    assert outcomes(found) == ["verified"] * 3 + ["repeated"] * 2
    assert found["weights_equal"] is None


def test_without_weights_the_payloads_alone_are_checked(
    sea: WrittenSea, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = replayed(sea.store, capsys)
    assert (code, set(outcomes(found))) == (0, {"no weights"})


def test_the_weights_of_the_last_island_are_compared_with_the_end(
    sea: WrittenSea, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt.save(sea.store.where("weights"), sea.truth.weights, step=20)
    code, found = replayed(sea.store, capsys, "--from", first)
    assert (code, found["weights_equal"]) == (0, True)
    assert set(outcomes(found)) == {"verified"}


def test_other_weights_at_the_end_are_wrong(
    sea: WrittenSea, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {name: tensor + 1 for name, tensor in sea.truth.weights.items()}
    ckpt.save(sea.store.where("weights"), other, step=20)
    code, found = replayed(sea.store, capsys, "--from", first)
    assert (code, found["weights_equal"]) == (1, False)


def test_a_merge_without_its_payload_and_those_after_it_are_not_repeated(
    sea: WrittenSea, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (part, *_) = merges(sea)[2].parts
    sea.store.delete([f"payloads/{part.island}/{part.digest}"])
    code, found = replayed(sea.store, capsys, "--from", first)
    assert code == 0
    assert outcomes(found) == ["verified", "verified", "no payload", "repeated", "no weights"]


def test_a_damaged_payload_is_wrong(
    sea: WrittenSea, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (part, *_) = merges(sea)[3].parts
    sea.store.write(f"payloads/{part.island}/{part.digest}", [b"other"])
    code, found = replayed(sea.store, capsys, "--from", first)
    assert code == 1
    assert outcomes(found) == ["verified"] * 3 + ["damaged", "repeated"]
    assert "are not those of its name" in found["merges"][3]["why"]


def test_a_result_with_another_digest_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sea = WrittenSea(tmp_path / "sea")
    sea.merge()
    sea.disturb(0)  # from here on islands state what the payloads do not give
    for _ in range(2):
        sea.merge()
    code, found = replayed(sea.store, capsys, "--from", zeros(tmp_path / "first"))
    assert code == 1
    assert outcomes(found) == ["differs", "repeated", "no weights"]


def test_weights_that_are_not_the_first_are_refused(
    sea: WrittenSea, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "other"
    ckpt.save(root, {each.name: torch.ones(each.shape) for each in PARAMETERS}, step=9)
    assert cli.main(["islands", "replay", "--sea", sea.store.root, "--from", str(root)]) == 1
    assert "its weights are not the first ones of the sea" in capsys.readouterr().err


def test_people_see_ranges_of_tides_and_what_is_wrong(
    sea: WrittenSea, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["islands", "replay", "--sea", sea.store.root, "--from", str(first)]) == 0
    said = capsys.readouterr().out
    assert "0-2" in said and "the digest is the one that islands state" in said


def test_a_folder_without_a_logbook_is_no_sea(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("status", "replay"):
        assert cli.main(["islands", command, "--sea", str(tmp_path)]) == 1
        assert "there is no logbook of a sea" in capsys.readouterr().err


def test_ranges_are_short() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
