"""Steps of both formats in a folder, what a path names, and the removal of old ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from holdfast import ckpt
from holdfast.adapters.shared.retention import keep_newest
from holdfast.adapters.torchtitan.finding import named_by, steps_there, stored_state
from holdfast.adapters.torchtitan.origin import LoadOrigin
from holdfast.adapters.torchtitan.retention import Pruner
from holdfast.ckpt.checkpoints import pins
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.store.local import LocalStore


def save(root: Path, *steps: int) -> None:
    for step in steps:
        ckpt.save(root, {"w": torch.full((3,), float(step)), "note": step}, step=step)


def of_dcp(root: Path, step: int, *, whole: bool = True) -> Path:
    folder = root / f"step-{step}"
    folder.mkdir(parents=True)
    if whole:
        (folder / ".metadata").write_bytes(b"x")
    return folder


def test_steps_of_both_formats_are_found_whole_ones_only(tmp_path: Path) -> None:
    assert steps_there(str(tmp_path / "none")).trusted is None
    save(tmp_path, 1, 12)
    of_dcp(tmp_path, 5)
    of_dcp(tmp_path, 7, whole=False)
    (tmp_path / "step-8_old").mkdir()
    there = steps_there(str(tmp_path))
    assert (there.ours, there.theirs, there.trusted) == ((1, 12), (5,), 12)


def test_a_cut_step_is_there_but_not_trusted(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (pack,) = (tmp_path / "step-000000000002" / "data").iterdir()
    pack.write_bytes(b"")
    there = steps_there(str(tmp_path))
    assert (there.ours, there.trusted) == ((1, 2), 1)


def test_a_path_names_a_root_a_step_or_a_directory_of_dcp(tmp_path: Path) -> None:
    save(tmp_path / "ours", 1, 2)
    first, second = (str(tmp_path / "ours" / f"step-00000000000{n}") for n in (1, 2))
    of_ours = LoadOrigin(path=second, kind="holdfast", model_only=True)
    assert named_by(str(tmp_path / "ours"), model_only=True) == of_ours
    assert named_by(f"{tmp_path}/ours/", model_only=True) == of_ours
    assert named_by(first, model_only=False) == LoadOrigin(path=first, kind="holdfast")
    theirs = str(of_dcp(tmp_path / "theirs", 4))
    assert named_by(theirs, model_only=False) == LoadOrigin(path=theirs, kind="dcp")
    assert named_by(str(tmp_path / "theirs"), model_only=True) is None
    assert named_by(str(tmp_path / "nowhere"), model_only=True) is None


def test_a_scheme_without_a_store_is_left_to_torchtitan() -> None:
    path = "abfs://host/run/step-4"
    assert named_by(path, model_only=True) == LoadOrigin(path=path, kind="dcp", model_only=True)


def test_the_names_in_a_step_are_read(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2, dtype=torch.bfloat16), "dataloader.world_size": 4}
    ckpt.save(tmp_path, state, step=3)
    found = stored_state(str(tmp_path / "step-000000000003"))
    assert found.dtypes == {"w": "bfloat16"}
    assert found.dp_degree == 4


def test_the_newest_stay_and_pinned_ones_and_what_is_not_holdfast_s(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5)
    pins.update(LocalStore(tmp_path), there=[1, 2], pin=[2], host="here", now_s=0)
    theirs = of_dcp(tmp_path, 1)
    assert keep_newest(str(tmp_path), 2, saved=5) == [1, 3]
    assert committed_steps(tmp_path) == [2, 4, 5]
    assert (theirs / ".metadata").is_file()


def test_the_newest_that_can_be_trusted_stays(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    for step in (2, 3):
        (pack,) = (tmp_path / f"step-00000000000{step}" / "data").iterdir()
        pack.write_bytes(b"")
    assert keep_newest(str(tmp_path), 2, saved=3) == []


def test_steps_after_the_one_just_saved_neither_count_nor_go(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 8, 9)
    assert keep_newest(str(tmp_path), 2, saved=3) == [1]
    assert committed_steps(tmp_path) == [2, 3, 8, 9]


def test_removals_end_when_the_pruner_is_closed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    pruner = Pruner(str(tmp_path), keep_last=2)
    for _ in range(5):
        pruner.start(3)
    pruner.close()
    assert committed_steps(tmp_path) == [2, 3]


def test_a_store_that_refuses_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    pruner = Pruner(str(tmp_path / "file"), keep_last=2)
    with caplog.at_level(logging.WARNING):
        pruner.start(3)
        pruner.close()
    assert "stay until the next save" in caplog.text
