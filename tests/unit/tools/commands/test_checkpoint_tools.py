"""`holdfast inspect` and `verify` on real checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from doubles.checkpoints import sample_arrays, write_checkpoint

from holdfast.ckpt.geometry.layout import Box
from holdfast.tools.cli import main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "root", sample_arrays(), world_size=2, step=7, values={"lr": 0.25})
    return tmp_path / "root"


def test_inspect_shows_everything(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(root)]) == 0
    shown = capsys.readouterr().out
    for text in ("7  (there: 7)", "dp=2", "model.weight", "10 x 7", "bfloat16", "scalar", "0.25"):
        assert text in shown


def test_inspect_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(root / "step-000000000007"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [7]
    assert found["tensors"]["model.weight"] == {
        "dtype": "float32",
        "shape": [10, 7],
        "chunk": [5, 7],
        "bytes": 280,
    }
    assert found["values"] == {"lr": 0.25}


def test_the_tree_draws_equal_siblings_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    norm, gate = np.ones((4,), "<f4"), np.ones((2, 3), "<f4")
    arrays = {f"model.layers.{i}.norm": (norm, "float32") for i in (0, 1, 2, 10)}
    arrays |= {f"model.layers.{i}.mlp.gate": (gate, "float32") for i in (0, 1, 2)}
    write_checkpoint(tmp_path, arrays, step=7, aliases={"head.weight": "model.layers.0.norm"})
    assert main(["inspect", str(tmp_path), "--tree"]) == 0
    shown = capsys.readouterr().out
    assert "0 … 2  2 tensors, 40 B each, 3 alike" in shown
    assert "mlp.gate  float32 2 x 3  24 B" in shown
    assert "10.norm  float32 4  16 B" in shown
    assert "head.weight  = model.layers.0.norm" in shown
    assert main(["inspect", str(tmp_path), "--tree", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)["tree"]
    assert (tree["tensors"], tree["bytes"]) == (7, 136)
    assert tree["below"]["model"]["below"]["layers"]["below"]["10"]["bytes"] == 16


def test_the_layout_shows_who_wrote_what(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(root), "--layout"]) == 0
    shown = capsys.readouterr().out
    assert "model.weight  10 x 7  2 writers, 2 chunks, cut along dim 0\n  0000011111\n" in shown
    assert "model.mask  9  2 writers, 2 chunks, cut along dim 0\n  000001111\n" in shown
    assert "optimizer.step  scalar  writer 0, 1 chunk\n  0\n" in shown
    assert "model.none  0 x 3  no elements" in shown
    assert main(["inspect", str(root), "--layout", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["layout"]
    parts = [(part["writer"], part["offset"], part["shape"]) for part in found["model.weight"]]
    assert parts == [(0, [0, 0], [5, 7]), (1, [5, 0], [5, 7])]
    assert found["model.weight"][1]["pack"].startswith("data/00001-")


def test_the_layout_of_a_grid_is_a_picture_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    array = np.arange(24.0).reshape(4, 6)
    boxes = [Box(offset=(i, j), shape=(2, 3)) for i in (0, 2) for j in (0, 3)]
    arrays = dict.fromkeys(("a.0.w", "a.1.w"), (array, "float64"))
    lie = dict.fromkeys(arrays, boxes)
    write_checkpoint(tmp_path, arrays, boxes=lie, world_size=4, step=7)
    assert main(["inspect", str(tmp_path), "--layout"]) == 0
    shown = capsys.readouterr().out
    assert "a.*.w (2)  4 x 6  4 writers, 4 chunks, cut along dim 0, 1\n" in shown
    assert "  000111\n  000111\n  222333\n  222333\n" in shown


def test_only_what_is_selected_is_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(root), "--json", "--select", "model.m*", "--select", "lr"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["tensors"]) == ["model.mask"]
    assert found["values"] == {"lr": 0.25}
    assert main(["inspect", str(root), "--select", "no*"]) == 1
    assert "no name matches 'no*'" in capsys.readouterr().err


def test_verify_says_sound_and_damaged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(root), "--deep"]) == 0
    assert "step 7: sound (every byte checked)" in capsys.readouterr().out
    pack = sorted((root / "step-000000000007/data").iterdir())[1]
    data = bytearray(pack.read_bytes())
    data[3] ^= 1
    pack.write_bytes(data)
    assert main(["verify", str(root)]) == 0
    assert main(["verify", str(root), "--deep"]) == 1
    said = capsys.readouterr().out
    assert f"{pack}: tensor model.weight" in said
    assert "offset 0" in said
    assert main(["verify", str(root), "--deep", "--all", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (fault,) = found["steps"]["7"]["faults"]
    assert (fault["file"], fault["tensor"], fault["offset"]) == (str(pack), "model.weight", 0)


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "8"], "no checkpoint of step 8; steps there: 7"),
        ([], "no checkpoint; "),
    ],
)
def test_what_is_not_there_is_one_paragraph(
    root: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    options: list[str],
    said: str,
) -> None:
    path = root if options else root / "nothing"
    assert main([command, str(path), *options]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_tools_do_not_import_torch(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from holdfast.tools.cli import main\n"
        f"assert main(['inspect', {str(root)!r}]) == 0\n"
        f"assert main(['verify', {str(root)!r}, '--deep']) == 0\n"
        f"assert main(['diff', {str(root)!r}, {str(root)!r}]) == 0\n"
        f"assert main(['cat', {str(root)!r}, 'model.bias', '--stats']) == 0\n"
        f"assert main(['prune', {str(root)!r}]) == 0\n"
        f"assert main(['reshard', {str(root)!r}, {str(tmp_path / 'o')!r}, '--mesh', 'dp=3']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_names_of_values_are_shown_whole_beside_a_long_value(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"optimizer.groups.0.decoupled_weight_decay": True, "notes": "x" * 500}
    write_checkpoint(root, sample_arrays(), step=8, values=values)
    assert main(["inspect", str(root)]) == 0
    assert "optimizer.groups.0.decoupled_weight_decay  true" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "verify", "cat", "diff", "reshard", "convert"])
def test_a_step_that_path_and_option_tell_differently_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    write_checkpoint(root, sample_arrays(), step=8)
    words = {
        "inspect": ["--step", "8"],
        "verify": ["--step", "8"],
        "cat": ["model.weight", "--step", "8"],
        "diff": [str(root), "--step-a", "8"],
        "reshard": [str(tmp_path / "out"), "--mesh", "dp=2", "--step", "8"],
        "convert": [str(tmp_path / "out.pt"), "--step", "8"],
    }
    assert main([command, str(root / "step-000000000007"), *words[command]]) == 2
    assert "is step 7, but step 8 was requested" in capsys.readouterr().err


def test_verifying_all_of_one_step_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([str(root / "step-000000000007")], [str(root), "--step", "7"]):
        assert main(["verify", *words, "--all"]) == 2
        assert "only step 7 was named" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify", "prune"])
def test_an_empty_path_is_not_the_working_directory(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(SystemExit, match="2"):
        main([command, ""])
    assert "the path is empty" in capsys.readouterr().err


def test_a_pattern_of_compression_that_names_nothing_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = ["--compress", "modle.*=zstd"]
    for words in (
        ["reshard", str(root), "--mesh", "dp=2"],
        ["convert", str(root), "--to", "holdfast"],
    ):
        words.insert(2, str(tmp_path / "out"))
        assert main([*words, *rule]) == 1
        assert "no name matches 'modle.*'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
