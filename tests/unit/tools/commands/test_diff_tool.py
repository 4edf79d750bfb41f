"""`holdfast diff` lists the differences of any layouts, and its exit code says if there are any."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.checkpoints import sample_arrays, write_checkpoint

from holdfast.tools.cli import main


@pytest.fixture
def a(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "a", sample_arrays(), world_size=2, values={"lr": 0.25})
    return tmp_path / "a"


def changed(root: Path, *, world_size: int = 3, values: dict[str, Any] | None = None) -> Path:
    """Write the sample again with a few changes, in another layout."""
    arrays = copy.deepcopy(sample_arrays())
    arrays["model.weight"][0][9, 6] += 1.0
    arrays["model.weight"][0][2, 1] += 1e-6
    arrays["model.bias"] = (arrays["model.bias"][0][:4], "bfloat16")
    arrays["model.new"] = arrays.pop("model.mask")
    write_checkpoint(root, arrays, world_size=world_size, values=values or {"lr": 0.5})
    return root


def report_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_checkpoint_is_the_same_in_another_layout(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "b", sample_arrays(), world_size=4, values={"lr": 0.25})
    assert main(["diff", str(a), str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "same: 8 of 8 tensors equal bit for bit" in said
    assert "saved by 2 ranks, B by 4" in said


def test_everything_that_differs_is_told(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = changed(tmp_path / "b")
    assert main(["diff", str(a), str(b), "--json"]) == 1
    found = report_of(capsys)
    assert not found["same"]
    assert (found["only_a"], found["only_b"]) == (["model.mask"], ["model.new"])
    (kind,) = found["kinds"]
    assert (kind["name"], kind["shape_a"], kind["shape_b"]) == ("model.bias", [5], [4])
    tallies = {tensor["name"]: tensor["tally"] for tensor in found["tensors"]}
    weight = tallies.pop("model.weight")
    assert (weight["differing"], weight["first"]["index"]) == (2, [2, 1])
    assert weight["largest"]["index"] == [9, 6]
    assert all(tally["differing"] == 0 for tally in tallies.values())
    assert found["values"] == [{"path": "lr", "a": 0.25, "b": 0.5}]


def test_people_are_told_the_same(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(a), str(changed(tmp_path / "b"))]) == 1
    said = capsys.readouterr().out
    for text in (
        "only in A (1)",
        "model.bias: bfloat16 5 -> bfloat16 4",
        "first at [2, 1]",
        "largest, largest relative at [9, 6]",
        "lr: 0.25 -> 0.5",
        "3 names that cannot be compared",
    ):
        assert text in said, said


def test_what_is_within_tolerance_is_not_different(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = changed(tmp_path / "b", values={"lr": 0.25})
    words = ["diff", str(a), str(b), "--select", "model.weight", "--json"]
    assert main([*words, "--rtol", "1e-3"]) == 1
    assert report_of(capsys)["tensors"][0]["tally"]["outside"] == 1
    assert main([*words, "--atol", "1.01"]) == 0
    assert report_of(capsys)["tensors"][0]["tally"]["differing"] == 2


def test_many_different_tensors_make_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        rng = np.random.default_rng(seed)
        arrays = {f"w{i}": (rng.standard_normal(4), "float64") for i in range(30)}
        write_checkpoint(tmp_path / name, arrays)
    words = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "largest |a-b|" in said
    assert "and 10 more (--full" in said
    assert main([*words, "--full"]) == 1
    assert capsys.readouterr().out.count("float64 4") == 30


def test_only_names_or_only_values_are_compared_on_request(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = changed(tmp_path / "b")
    assert main(["diff", str(a), str(b), "--keys", "--json"]) == 1
    found = report_of(capsys)
    assert found["tensors"] == [] and found["values"] == [] and found["kinds"]
    assert main(["diff", str(a), str(b), "--values", "--json"]) == 1
    found = report_of(capsys)
    assert found["kinds"] == [] and found["only_a"] == [] and found["values"]


def test_equal_checksums_are_taken_on_request_and_said_to_be_no_proof(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = changed(tmp_path / "b", world_size=2, values={"lr": 0.25})
    words = ["diff", str(a), str(b), "--checksums", "--select", "model.[wp]*"]
    assert main([*words, "--json"]) == 1
    read = {tensor["name"]: tensor["read"] for tensor in report_of(capsys)["tensors"]}
    assert read == {"model.weight": True, "model.phase": False}
    assert main(words) == 1
    assert "which is no proof" in capsys.readouterr().out


def test_tied_names_are_compared_under_every_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    array = np.arange(6.0)
    write_checkpoint(tmp_path / "a", {"x": (array, "float64")}, aliases={"y": "x"})
    other = {"x": (array, "float64"), "y": (array + 1, "float64")}
    write_checkpoint(tmp_path / "b", other)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    found = report_of(capsys)
    assert {t["name"]: t["tally"]["differing"] for t in found["tensors"]} == {"x": 0, "y": 6}
    assert "tie different names" in found["notes"][0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--select", "nothing*"], "no name matches 'nothing*'"),
        (["--step-a", "9"], "no checkpoint of step 9"),
    ],
)
def test_trouble_is_2_and_one_paragraph(
    a: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(a), str(a), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_damage_is_trouble_and_not_a_difference(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = changed(tmp_path / "b")
    pack = sorted((b / "step-000000000001/data").iterdir())[1]
    data = bytearray(pack.read_bytes())
    data[3] ^= 1
    pack.write_bytes(data)
    assert main(["diff", str(a), str(b)]) == 2
    assert str(pack) in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--rtol", "-1"], ["--atol", "x"], ["--keys", "--values"]])
def test_a_wrong_command_line_is_2(a: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["diff", str(a), str(a), *words])
    assert ended.value.code == 2
