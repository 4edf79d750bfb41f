"""inspect, diff and reshard take checkpoints of other formats as `convert` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.zero import parameters, write_zero

from holdfast.ckpt.checkpoints.catalog import load_manifest
from holdfast.ckpt.store.local import LocalStore
from holdfast.tools.cli import main
from holdfast.tools.commands.foreign import format_of


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    write_zero(tmp_path / "zero", stage=3)
    return tmp_path / "zero"


def said(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    found = capsys.readouterr()
    return found.out + found.err


def test_inspect_shows_format_step_and_tensors(
    zero: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "inspect", zero)
    assert "ds-zero (without checksums)" in text
    assert "model.w" in text
    assert "model." not in said(capsys, "inspect", zero, "--select", "deepspeed.*")
    assert "exp_avg" in said(capsys, "inspect", zero, "--tree")
    found: dict[str, Any] = json.loads(said(capsys, "inspect", zero, "--json"))
    assert (found["format"], found["step"]) == ("ds-zero", 4)
    assert found["tensors"]["model.w"] == {"dtype": "float32", "shape": [3, 5]}


def test_what_other_formats_lack_is_refused(zero: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not record it" in said(capsys, "inspect", zero, "--layout", code=2)
    assert "with one step" in said(capsys, "inspect", zero, "--step", "4", code=2)
    assert "has none" in said(capsys, "diff", zero, zero, "--checksums", code=2)


def test_diff_compares_formats_bit_for_bit(
    zero: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    said(capsys, "convert", zero, runs)
    assert "same: 14 of 14 tensors equal" not in said(capsys, "diff", zero, tmp_path, code=2)
    assert "tensors equal bit for bit" in said(capsys, "diff", zero, runs)
    changed = write_zero(
        tmp_path / "other",
        stage=1,
        optim=lambda content: content["optimizer_state_dict"]["single_partition_of_fp32_groups"][
            1
        ].add_(1),
    )
    text = said(capsys, "diff", zero, changed, "--select", "model.*", code=1)
    assert "model.b" in text
    assert "1 different" in text


def test_reshard_writes_a_checkpoint_of_ours(
    zero: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "reshard", zero, tmp_path / "four", "--mesh", "dp=4")
    assert "step 4 written" in text
    manifest = load_manifest(LocalStore(tmp_path / "four"), "step-000000000004")
    assert manifest.mesh == {"dp": 4}
    assert "same:" in said(capsys, "diff", zero, tmp_path / "four")
    assert "already exists" in said(
        capsys, "reshard", zero, tmp_path / "four", "--mesh", "dp=4", code=1
    )


def test_other_files_are_shown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(parameters(), tmp_path / "m.pt")
    assert "torch (without checksums)" in said(capsys, "inspect", tmp_path / "m.pt")
    assert format_of(str(tmp_path)) is None
    assert format_of(str(tmp_path / "nothing")) is None


def test_zero_is_not_a_target(
    zero: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "convert", zero, tmp_path / "x", "--to", "ds-zero", code=1)
    assert "--to ds-universal" in text
    assert not (tmp_path / "x").exists()


def test_convert_tells_what_an_engine_of_stage_3_does(
    zero: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "convert", zero, tmp_path / "u", "--to", "ds-universal")
    assert "share one step tensor" in text
    assert "differ: weight_decay" in text
    assert "ds-universal (without checksums)" in said(capsys, "inspect", tmp_path / "u")
