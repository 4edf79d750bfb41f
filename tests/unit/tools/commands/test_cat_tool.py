"""`holdfast cat` prints stored content: numbers as numpy would, statistics, pictures, values."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from doubles.checkpoints import sample_arrays, write_checkpoint

from holdfast.tools.cli import main

LARGE = np.random.default_rng(5).standard_normal((60, 50, 4)).astype("<f4")
HALVES = (np.arange(2048, dtype="<u4") << 4).astype("<u2")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    arrays = {**sample_arrays(), "large": (LARGE, "float32"), "halves": (HALVES, "bfloat16")}
    arrays["odd[0]"] = (np.arange(3, dtype="<i4"), "int32")
    values = {"optimizer.groups.0.lr": 0.125, "schedule": {"name": "cosine", "at": [1, 2]}}
    write_checkpoint(tmp_path / "r", arrays, world_size=2, values=values, aliases={"tied": "large"})
    return tmp_path / "r"


def cat(root: Path, *words: str) -> int:
    return main(["cat", str(root), *words])


def report_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("inner", ["", "[3]", "[1:9:2, 2:]", "[..., -1]", "[5, 5]", "[0:0]"])
def test_small_selections_are_printed_whole(
    root: Path, inner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    array = sample_arrays()["model.weight"][0]
    wanted = eval(f"array{inner}", {"array": array})
    assert cat(root, f"model.weight{inner}", "--json") == 0
    found = report_of(capsys)
    np.testing.assert_array_equal(np.array(found["values"], "<f4").reshape(wanted.shape), wanted)
    assert found["shape"] == list(wanted.shape)
    assert cat(root, f"model.weight{inner}") == 0
    assert np.array2string(wanted, max_line_width=100) in capsys.readouterr().out


@pytest.mark.parametrize("inner", ["", "[::2]", "[:, 7]", "[3:50:3, ...]"])
def test_large_selections_show_their_corners_as_numpy_does(
    root: Path, inner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = eval(f"array{inner}", {"array": LARGE})
    assert cat(root, f"large{inner}") == 0
    printed = capsys.readouterr().out.partition("\n")[2]
    assert wanted.size > 1000 or inner == "[:, 7]"
    threshold = 0 if wanted.size > 1000 else 1000
    assert printed.strip() == np.array2string(wanted, threshold=threshold, max_line_width=100)
    assert cat(root, f"large{inner}", "--full", "--json") == 0
    np.testing.assert_array_equal(np.array(report_of(capsys)["values"], "<f4"), wanted)


def test_numbers_that_numpy_lacks_are_shown_as_float32(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cat(root, "halves[2000:2002]", "--json") == 0
    wanted = (HALVES[2000:2002].astype("<u4") << 16).view("<f4")
    assert report_of(capsys)["values"] == wanted.tolist()
    assert cat(root, "model.phase[0, 0]", "--json") == 0
    assert complex(report_of(capsys)["values"]) == sample_arrays()["model.phase"][0][0, 0]


def test_a_name_with_brackets_and_a_tied_name_are_found(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cat(root, "odd[0]", "--json") == 0
    assert report_of(capsys)["values"] == [0, 1, 2]
    assert cat(root, "odd[0][1]", "--json") == 0
    assert report_of(capsys)["values"] == 1
    assert cat(root, "tied[0, 0, 0]", "--json") == 0
    assert report_of(capsys)["name"] == "large"


@pytest.mark.parametrize(
    ("inner", "said"),
    [("[99]", "out of range"), ("[a]", "neither an integer"), ("[1,2,3,4]", "4 indices")],
)
def test_a_wrong_slice_is_a_usage_error_that_names_the_shape(
    root: Path, inner: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cat(root, f"large{inner}") == 2
    error = capsys.readouterr().err
    assert said in error
    assert "60 x 50 x 4" in error


def test_an_unknown_name_is_met_with_similar_ones(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cat(root, "model.wieght[0]") == 1
    assert "similar: model.weight" in capsys.readouterr().err


def test_plain_values_are_printed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cat(root, "optimizer.groups.0.lr") == 0
    assert capsys.readouterr().out == "0.125\n"
    assert cat(root, "schedule") == 0
    assert capsys.readouterr().out.splitlines() == [
        "schedule.at.0 = 1",
        "schedule.at.1 = 2",
        'schedule.name = "cosine"',
    ]
    assert cat(root, "rank", "--json") == 0
    assert report_of(capsys)["values"] == {"rank (rank 0)": 0, "rank (rank 1)": 1}


def test_statistics_are_those_of_the_selection(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cat(root, "large[::7, :, 1]", "--stats", "--json", "--bins", "5") == 0
    found, wanted = report_of(capsys), LARGE[::7, :, 1].astype(float)
    assert found["stats"]["mean"] == pytest.approx(wanted.mean())
    assert found["stats"]["norm"] == pytest.approx(np.linalg.norm(wanted))
    assert found["stats"]["count"] == wanted.size == sum(b["count"] for b in found["histogram"])
    assert len(found["histogram"]) == 5
    assert cat(root, "large", "--stats", "--histogram") == 0
    said = capsys.readouterr().out
    assert "50 % below" in said
    assert "█" in said


@pytest.mark.parametrize("memory", ["1MiB", "1GiB"])
@pytest.mark.parametrize("name", ["large", "large[::7, 1:3]", "halves", "model.none", "odd[0]"])
def test_the_numpy_file_holds_the_selection(
    root: Path, tmp_path: Path, name: str, memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.npy"
    assert cat(root, name, "--npy", str(file), "--memory", memory) == 0
    wanted = {
        "large": LARGE,
        "large[::7, 1:3]": LARGE[::7, 1:3],
        "halves": (HALVES.astype("<u4") << 16).view("<f4"),
        "model.none": np.empty((0, 3), "<f4"),
        "odd[0]": np.arange(3, dtype="<i4"),
    }[name]
    found = np.load(file, allow_pickle=False)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(found, wanted)


def test_pictures_are_written(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, png = tmp_path / "h.svg", tmp_path / "h.png"
    assert cat(root, "large", "--svg", str(svg), "--png", str(png), "--bins", "9") == 0
    drawing = ElementTree.fromstring(svg.read_text())
    assert len(drawing.findall(".//{*}rect")) == 9
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (4, 1024)
    start = data.index(b"IDAT") + 4
    (size,) = struct.unpack(">I", data[start - 8 : start - 4])
    assert len(zlib.decompress(data[start : start + size])) == 1024 * (1 + 3 * 4)
