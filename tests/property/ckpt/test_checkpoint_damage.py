"""Any changed byte of a checkpoint is detected, and its file is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.checkpoints import sample_arrays, write_checkpoint
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast import ckpt
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.store.places import open_store


def make() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), "lr": 0.5}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(ckpt.save(tmp_path_factory.mktemp("saved"), make(), step=3))


def files_of(step: Path) -> list[Path]:
    return sorted(p for p in step.rglob("*") if p.is_file() and p.name != "refs.json")


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_a_changed_byte_is_found_on_load(saved: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(files_of(saved)))
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    flip = data.draw(st.integers(1, 255))
    bad = bytearray(good)
    bad[at] ^= flip
    path.write_bytes(bad)
    try:
        with pytest.raises(ckpt.CorruptError) as caught:
            ckpt.load(saved.parent, make())
        assert str(path) in str(caught.value)
    finally:
        path.write_bytes(good)
    assert ckpt.load(saved.parent, make()).step == 3


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_a_file_cut_off_or_longer_is_found_on_load(saved: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(files_of(saved)))
    good = path.read_bytes()
    size = data.draw(st.integers(0, len(good) + 3).filter(lambda n: n != len(good)))
    os.truncate(path, size)
    try:
        with pytest.raises(ckpt.CorruptError) as caught:
            ckpt.load(saved.parent, make(), step=3)
        assert str(path) in str(caught.value)
    finally:
        path.write_bytes(good)


@pytest.fixture(scope="module")
def irregular(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("irregular")
    write_checkpoint(root, sample_arrays(), world_size=3, with_grids=False)
    return root / "step-000000000001"


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_a_changed_byte_of_any_file_is_found_by_a_deep_check(
    irregular: Path, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(sorted(p for p in irregular.rglob("*") if p.is_file())))
    good = path.read_bytes()
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bad)
    try:
        found = list(faults(open_store(irregular.parent), 1, deep=True))
        assert [fault.file for fault in found] == [str(path)]
        assert (found[0].tensor is not None) == (path.suffix == ".pack")
    finally:
        path.write_bytes(good)
    assert list(faults(open_store(irregular.parent), 1, deep=True)) == []


@pytest.mark.parametrize("part", ["data", "index", "manifest.json"])
def test_a_file_that_is_gone_is_found(saved: Path, tmp_path: Path, part: str) -> None:
    shutil.copytree(saved, tmp_path / saved.name)
    place = tmp_path / saved.name / part
    path = next(place.iterdir()) if place.is_dir() else place
    path.unlink()
    error = ckpt.NotFoundError if part == "manifest.json" else ckpt.CorruptError
    with pytest.raises(error, match=str(path if place.is_dir() else tmp_path)):
        ckpt.load(tmp_path, make())


def test_what_is_damaged_is_passed_over_for_the_step_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        ckpt.save(tmp_path, {"w": torch.full((50,), float(step))}, step=step)
    (pack,) = (tmp_path / "step-000000000002/data").iterdir()
    good = pack.read_bytes()
    for at in range(0, len(good), 5):
        bad = bytearray(good)
        bad[at] ^= 255
        pack.write_bytes(bad)
        state = {"w": torch.zeros(50)}
        caplog.clear()
        assert ckpt.load(tmp_path, state).step == 1
        assert float(state["w"][0]) == 1.0
        assert f"{pack}: tensor w" in caplog.text
