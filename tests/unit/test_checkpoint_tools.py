"""`holdfast inspect`, `verify` and `reshard` on real checkpoints."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.assemble import Assembler
from ckpt.rewrite import export_safetensors
from ckpt.source import StoreSource
from ckpt.testing.checkpoints import sample_arrays, write_checkpoint
from tools.cli import main


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
    [(["--step", "8"], "no checkpoint of step 8; steps there: 7"), ([], "no such directory")],
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


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_reshard_writes_what_dp_ranks_would_have(
    root: Path, tmp_path: Path, dp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / f"dp{dp}"
    assert main(["reshard", str(root), str(target), "--mesh", f"dp={dp}"]) == 0
    assert str(target / "step-000000000007") in capsys.readouterr().out
    assert main(["verify", str(target), "--deep"]) == 0
    with StoreSource(target, 7) as source:
        assembler = Assembler(source)
        for fqn, (array, _) in sample_arrays().items():
            np.testing.assert_array_equal(assembler.box(fqn), array)
        assert source.manifest.mesh == {"dp": dp}
        assert source.manifest.merged is None
        assert source.manifest.values == {"lr": 0.25}
        boxes = [
            [chunk.box.shape for chunk in index.tensors["model.weight"].chunks]
            for index in source.indexes()
            if "model.weight" in index.tensors
        ]
        full = -(-10 // dp)
        assert boxes[0] == [(full, 7)]


def test_reshard_refuses_its_own_source(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reshard", str(root), str(root), "--mesh", "dp=2"]) == 1
    assert "the same" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", ["tp=2", "dp=0", "dp=x", "dp=99999", "2"])
def test_a_wrong_mesh_is_a_usage_error(
    root: Path, tmp_path: Path, mesh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["reshard", str(root), str(tmp_path / "x"), "--mesh", mesh])
    assert ended.value.code == 2
    assert "give dp=N" in capsys.readouterr().err


def save_net(root: Path) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(net.parameters())
    ckpt.save(root, {"model": net, "optimizer": optimizer, "n": 1}, step=1)
    return net


def test_module_tensors_become_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    net = save_net(tmp_path / "root")
    assert (
        main(["reshard", str(tmp_path / "root"), str(tmp_path / "out"), "--to", "safetensors"]) == 0
    )
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == net.state_dict().keys()
    assert all(torch.equal(found[name], t) for name, t in net.state_dict().items())


def test_large_modules_become_several_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    net = save_net(tmp_path / "root")
    with StoreSource(tmp_path / "root", 1) as source:
        *files, index = export_safetensors(source, tmp_path / "out", file_bytes=40)
    assert len(files) > 1
    places = json.loads(index.read_text())["weight_map"]
    for name, tensor in net.state_dict().items():
        assert torch.equal(load_file(tmp_path / "out" / places[name])[name], tensor)


def test_several_modules_need_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ckpt.save(tmp_path / "r", {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}, step=1)
    words = ["reshard", str(tmp_path / "r"), str(tmp_path / "out"), "--to", "safetensors"]
    assert main(words) == 1
    assert "actor, critic; say with --name" in capsys.readouterr().err
    assert main([*words, "--name", "critic"]) == 0


def test_without_safetensors_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_net(tmp_path / "root")
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> object:
        if name.startswith("safetensors"):
            raise ModuleNotFoundError(name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    assert (
        main(["reshard", str(tmp_path / "root"), str(tmp_path / "out"), "--to", "safetensors"]) == 1
    )
    assert "holdfast[safetensors]" in capsys.readouterr().err


def test_the_tools_do_not_import_torch(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from tools.cli import main\n"
        f"assert main(['inspect', {str(root)!r}]) == 0\n"
        f"assert main(['verify', {str(root)!r}, '--deep']) == 0\n"
        f"assert main(['reshard', {str(root)!r}, {str(tmp_path / 'o')!r}, '--mesh', 'dp=3']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
