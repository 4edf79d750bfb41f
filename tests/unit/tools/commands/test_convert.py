"""`holdfast convert`: between any two formats."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from doubles.interchange import read_all
from torch import nn

from holdfast import ckpt
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.convert.interchange import TensorSource
from holdfast.ckpt.errors import MismatchError, NotFoundError
from holdfast.tools.cli import main
from holdfast.tools.commands.formats import FORMATS, SourceOptions, source_format, target_format

TARGETS = {
    "holdfast": "root2",
    "dcp": "dcp",
    "safetensors": "m.safetensors",
    "torch": "m.pt",
    "zarr": "m.zarr",
}

OTHERS = [name for name in FORMATS if not name.startswith("ds-")]
"""Formats for any state; those of DeepSpeed are for a module with its optimizer."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.mid = nn.Linear(4, 4).to(torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(7))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def root(tmp_path: Path, net: Net) -> Path:
    ckpt.save(tmp_path / "root", {"model": net, "epoch": 3, "best": (1, 2.5)}, step=7)
    return tmp_path / "root"


@contextmanager
def opened(path: Path, kind: str) -> Iterator[TensorSource]:
    source = FORMATS[kind].source(str(path), SourceOptions())
    with closing(source):
        yield source


def report_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("second", OTHERS)
@pytest.mark.parametrize("first", [name for name in OTHERS if name != "holdfast"])
def test_every_format_becomes_every_other(
    root: Path, tmp_path: Path, first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    middle, last = tmp_path / TARGETS[first], tmp_path / "last" / TARGETS[second]
    last.parent.mkdir()
    assert main(["convert", str(root), str(middle), "--to", first, "--prefix", ""]) == 0
    assert source_format(str(middle)) == first
    found = report_of(
        ["convert", str(middle), str(last), "--to", second, "--memory", "8MiB"], capsys
    )
    assert found["source"]["format"] == first
    with opened(root, "holdfast") as start, opened(last, second) as end:
        wanted = read_all(start)
        assert read_all(end) == wanted
        for name in wanted:
            one = start.specs[start.aliases.get(name, name)]
            two = end.specs[end.aliases.get(name, name)]
            assert (one.dtype, one.shape) == (two.dtype, two.shape)
        if "safetensors" not in (first, second) and "dcp" not in (first, second):
            assert end.values == start.values
    if second == "safetensors":
        assert found["values"] == 0


def test_a_model_comes_back_from_safetensors_and_loads(
    root: Path, tmp_path: Path, net: Net, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    out = tmp_path / "hf"
    found = report_of(["convert", str(root), str(out), "--to", "safetensors"], capsys)
    assert (found["tensors"], found["tied"], found["values_left_out"]) == (4, 1, 0)
    files = load_file(out / "model.safetensors")
    assert all(torch.equal(files[name], net.state_dict()[name]) for name in files)
    assert set(net.state_dict()) - set(files) == {"head.weight"}
    back = tmp_path / "back"
    words = ["convert", str(out), str(back), "--prefix", "model.", "--step", "9", "--dp", "3"]
    assert main(words) == 0
    assert main(["verify", str(back), "--deep"]) == 0
    other = Net()
    ckpt.load(back, {"model": other})
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), net.parameters(), strict=True))
    assert other.head.weight is other.embed.weight
    assert committed_steps(back) == [9]
    with ckpt.open(back) as opened_back:
        assert (opened_back.manifest.mesh, opened_back.manifest.world_size) == ({"dp": 3}, 3)


def test_the_source_s_step_is_kept(root: Path, tmp_path: Path) -> None:
    assert main(["convert", str(root), str(tmp_path / "copy"), "--to", "holdfast"]) == 0
    assert committed_steps(tmp_path / "copy") == [7]
    assert main(["convert", str(root), str(tmp_path / "a.zarr")]) == 0
    assert main(["convert", str(tmp_path / "a.zarr"), str(tmp_path / "b")]) == 0
    assert committed_steps(tmp_path / "b") == [7]


def test_several_modules_need_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    actor, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    ckpt.save(tmp_path / "r", {"actor": actor, "critic": critic}, step=1)
    words = ["convert", str(tmp_path / "r"), str(tmp_path / "out.safetensors")]
    assert main(words) == 1
    assert "actor, critic; choose one of them with --name" in capsys.readouterr().err
    assert main([*words, "--name", "critic", "--select", "*.weight"]) == 0
    with opened(tmp_path / "out.safetensors", "safetensors") as source:
        assert read_all(source) == {"weight": critic.weight.detach().numpy().tobytes()}


def test_globs_name_what_the_source_has(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(root), str(tmp_path / "a.pt"), "--name", "model"]
    assert main([*words, "--select", "model.mid.*", "--select", "*.count"]) == 0
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert set(found) == {"mid.weight", "mid.bias", "count"}
    assert main(["convert", str(root), str(tmp_path / "b.pt"), "--select", "nope*"]) == 1
    assert "selects none of its 4 tensors" in capsys.readouterr().err
    assert not (tmp_path / "b.pt").exists()


def test_ties_are_told_or_stored_twice(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert main(["convert", str(root), str(first), "--duplicate-tied"]) == 0
    with opened(first, "safetensors") as source:
        assert {"embed.weight", "head.weight"} <= source.specs.keys()
    words = ["convert", str(first), str(second), "--select", "embed*", "--select", "tied"]
    assert report_of([*words, "--tie", "tied=embed.weight"], capsys)["tied"] == 1
    with opened(second, "safetensors") as source:
        assert source.aliases == {"tied": "embed.weight"}


@pytest.mark.parametrize("kind", OTHERS)
def test_nothing_is_overwritten(
    root: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / TARGETS[kind]
    words = ["convert", str(root), str(target), "--to", kind]
    assert main(words) == 0
    before = {p: p.read_bytes() for p in [target, *target.rglob("*")] if p.is_file()}
    capsys.readouterr()
    assert main(words) == 1
    assert "exists" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in [target, *target.rglob("*")] if p.is_file()} == before


def test_a_source_of_no_known_format_is_told_what_was_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert main(["convert", str(tmp_path / "notes.txt"), str(tmp_path / "x")]) == 1
    said = capsys.readouterr().err
    assert all(f"{name}: {entry.evidence}" in said for name, entry in FORMATS.items())
    assert main(["convert", str(tmp_path / "nothing"), str(tmp_path / "x")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_the_target_s_format_follows_from_its_name(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert target_format("a/b.safetensors", "holdfast") == "safetensors"
    assert target_format("a/b.pth", "holdfast") == "torch"
    assert target_format("a/b.zarr", "dcp") == "zarr"
    assert target_format("a/b", "dcp") == "holdfast"
    assert main(["convert", str(root), str(tmp_path / "x")]) == 1
    assert "known endings: .safetensors, .pt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--tie", "a"], ["--step", "-1"], ["--memory", "x"], ["--from", "npz"]]
)
def test_a_wrong_option_is_a_usage_error(root: Path, tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(root), str(tmp_path / "x.pt"), *words])
    assert ended.value.code == 2


def test_too_little_memory_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(root), str(tmp_path / "x.pt"), "--memory", "1MiB"]) == 1
    assert "at least 8 MiB" in capsys.readouterr().err


def test_safetensors_both_ways_need_neither_torch_nor_the_library(
    root: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; from holdfast.tools.cli import main\n"
        f"assert main(['convert', {str(root)!r}, {str(tmp_path / 'o.safetensors')!r}]) == 0\n"
        f"assert main(['convert', {str(tmp_path / 'o.safetensors')!r}, "
        f"{str(tmp_path / 'back')!r}]) == 0\n"
        "assert not {'torch', 'safetensors'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m.pt", "--dp", "4"], "--dp is for holdfast targets, and this one is torch"),
        (["m.pt", "--compress", "*=zstd"], "--compress is for holdfast targets"),
        (["m.pt", "--file-size", "1MiB"], "--file-size is for safetensors targets"),
        (["m.pt", "--duplicate-tied"], "--duplicate-tied is for safetensors targets"),
        (["m.pt", "--tie", "a=b"], "--tie is for safetensors sources, and this one is holdfast"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["convert", str(root), str(tmp_path / words[0]), *words[1:]]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / words[0]).exists()


def test_dimensions_of_a_zarr_directory_have_names(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.zarr"
    words = ["--dimension-names", "*.embed.weight=token,feature"]
    assert main(["convert", str(root), str(target), *words]) == 0
    group = zarr.open_group(target, mode="r")
    names = {name: array.metadata.dimension_names for name, array in group.arrays()}
    assert names["model.embed.weight"] == ("token", "feature")
    assert names["model.mid.bias"] == ("model.mid.bias.0",)
    assert names["model.count"] == ()


@pytest.mark.parametrize("option", [["--prefix", "model"], ["--name", ""], ["--name", "model."]])
def test_a_prefix_ends_where_a_name_does(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(root), str(tmp_path / "m.safetensors"), *option])
    assert "name" in capsys.readouterr().err
    assert not (tmp_path / "m.safetensors").exists()


ROWS = """
format = 1
[[pattern]]
name = "rows"
pieces = "tp{tp}.{name...}"
whole = "model.{name...}"
where = { name = ".*weight" }
join = [{ over = "tp", as = "fragment", axis = 1 }]
[[pattern]]
pieces = "tp{tp}.{name...}"
whole = "model.{name...}"
join = [{ over = "tp", as = "replicate" }]
otherwise = true
"""


def rank_files(folder: Path, ranks: int = 2) -> dict[str, torch.Tensor]:
    """Write one file for each rank of tensor parallelism; return the whole tensors."""
    full = {"a.weight": torch.arange(24.0).reshape(3, 8), "a.bias": torch.arange(3.0)}
    folder.mkdir()
    for rank, part in enumerate(full["a.weight"].chunk(ranks, 1)):
        held = {"a.weight": part.clone(), "a.bias": full["a.bias"], "iteration": 9}
        torch.save(held, folder / f"tp{rank}.pt")
    return full


def test_files_of_ranks_come_together_by_patterns_and_are_taken_apart_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = rank_files(tmp_path / "ranks")
    (tmp_path / "rows.toml").write_text(ROWS)
    words = ["--patterns", str(tmp_path / "rows.toml")]
    root = str(tmp_path / "root")
    report = report_of(["convert", str(tmp_path / "ranks"), root, *words], capsys)
    assert (report["source"]["format"], report["tensors"], report["left_out"]) == ("torch", 2, [])
    with ckpt.open(root) as found:
        assert torch.equal(found["model.a.weight"][...], full["a.weight"])
        assert torch.equal(found["model.a.bias"][...], full["a.bias"])
        assert found.values == {"model.iteration": 9}
    apart = [*words, "--reverse", "--set", "tp=4", "--select", "model.a.*"]
    report_of(["convert", root, str(tmp_path / "four.pt"), *apart], capsys)
    pieces = torch.load(tmp_path / "four.pt", weights_only=True)
    assert set(pieces) == {f"tp{rank}.a.{name}" for name in ("weight", "bias") for rank in range(4)}
    assert torch.equal(pieces["tp3.a.weight"], full["a.weight"][:, 6:])


def test_a_conversion_whose_pieces_are_missing_is_refused_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank_files(tmp_path / "ranks")
    (tmp_path / "rows.toml").write_text(ROWS)
    first = ["convert", str(tmp_path / "ranks"), str(tmp_path / "root")]
    report_of(first, capsys)
    words = ["--patterns", str(tmp_path / "rows.toml"), "--set", "tp=3", "--to", "holdfast"]
    assert main(["convert", str(tmp_path / "root"), str(tmp_path / "out"), *words]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "rows.toml: pattern 'model.{name...}'" in said
    assert "misses its pieces 2 (found tp 0, 1, needed 0, 1, 2)" in said
    assert not committed_steps(tmp_path / "out")


@pytest.mark.parametrize("words", [["--set", "tp=2"], ["--reverse"]])
def test_options_of_patterns_need_patterns(
    words: list[str], root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(root), str(tmp_path / "x.pt"), *words]) == 2
    assert "are for --patterns, which is missing" in capsys.readouterr().err


def test_a_folder_is_taken_for_files_of_ranks_only_by_their_names(tmp_path: Path) -> None:
    rank_files(tmp_path / "tp")
    assert source_format(str(tmp_path / "tp")) == "torch"
    for name in ("pytorch_model-00001-of-00002.bin", "mp_rank_00_model_states.pt"):
        folder = tmp_path / name
        folder.mkdir()
        torch.save({}, folder / name)
        with pytest.raises(MismatchError, match="the format is not recognised"):
            source_format(str(folder))


def test_files_of_ranks_are_refused_where_two_have_one_name(tmp_path: Path) -> None:
    rank_files(tmp_path / "tp")
    torch.save({}, tmp_path / "tp/tp0.pth")
    with pytest.raises(MismatchError, match=r"two files are called tp0; rename one of them"):
        FORMATS["torch"].source(str(tmp_path / "tp"), SourceOptions())
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="no file of a rank is there"):
        FORMATS["torch"].source(str(tmp_path / "empty"), SourceOptions())


def test_frozen_tensors_that_a_run_builds_again_are_said_to_be_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    ckpt.save(tmp_path / "run", {"model": ckpt.Rebuilt(model)}, step=1)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out.safetensors")]) == 0
    assert "2 frozen tensors are not in the checkpoint" in capsys.readouterr().out
