"""Files that no committed step needs are found, classified, and left in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from doubles.checkpoints import sample_arrays, write_checkpoint
from doubles.pruning import prune

from holdfast.ckpt.checkpoints.catalog import step_folder
from holdfast.ckpt.checkpoints.retention import note
from holdfast.ckpt.checkpoints.unreferenced import UnreferencedKind, unreferenced
from holdfast.ckpt.store.local import LocalStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        write_checkpoint(tmp_path, sample_arrays(step), step=step, world_size=2)
    return tmp_path


def found(root: Path) -> dict[str, UnreferencedKind]:
    return {
        str(Path(each.where).relative_to(root)): each.kind
        for each in unreferenced(LocalStore(root))
    }


def test_of_committed_steps_all_is_needed(root: Path) -> None:
    (root / "retention.json").write_text("{}")
    (root / "notes.txt").write_text("beside the steps lies what is not ours")
    assert found(root) == {}


@pytest.mark.parametrize("name", ["data/stray.pack", "index/stray.json", "stray"])
def test_a_stray_file_beside_a_committed_step_is_found(root: Path, name: str) -> None:
    (root / step_folder(2) / name).write_bytes(b"nobody refers to it")
    assert found(root) == {f"{step_folder(2)}/{name}": UnreferencedKind.FILE}


def test_a_save_that_did_not_finish_is_told_as_that(root: Path) -> None:
    (root / step_folder(2) / "manifest.json").unlink()
    kinds = found(root)
    assert len(kinds) == 5 and set(kinds.values()) == {UnreferencedKind.SAVE}
    other = root / step_folder(7)
    other.mkdir()
    (other / "__0_0.distcp").write_bytes(b"of another kind of checkpoint")
    assert found(root) == kinds


def test_what_a_writer_left_unpublished_is_found(root: Path) -> None:
    left = f"{step_folder(1)}/data/.00000.pack.1-1.tmp"
    (root / left).write_bytes(b"half a pack")
    assert found(root) == {left: UnreferencedKind.ABANDONED}


def test_a_removed_step_keeps_what_others_need_and_nothing_else(root: Path) -> None:
    ones = {"x": (np.ones(1000), "float64"), "y": (np.zeros(9), "float64")}
    write_checkpoint(root, ones, step=3)
    write_checkpoint(root, {**ones, "y": (np.ones(9), "float64")}, step=4, base=3)
    prune(root, keep_last=1)
    left = [path.name for path in (root / step_folder(3)).rglob("*") if path.is_file()]
    assert "retained.json" in left and len(left) == 2
    assert found(root) == {}
    stray = root / step_folder(3) / "data" / "stray.pack"
    stray.write_bytes(b"not this one")
    assert found(root) == {f"{step_folder(3)}/data/stray.pack": UnreferencedKind.FILE}


def test_what_was_to_be_swept_and_was_not_is_found(root: Path) -> None:
    (root / step_folder(1) / "data" / "old.pack").write_bytes(b"replaced")
    note(LocalStore(root), step_folder(1), ["data/old.pack"])
    assert found(root) == {
        f"{step_folder(1)}/data/old.pack": UnreferencedKind.FILE,
        f"{step_folder(1)}/retained.json": UnreferencedKind.FILE,
    }


def test_where_a_manifest_is_damaged_nothing_of_its_step_is_judged(root: Path) -> None:
    (root / step_folder(1) / "stray").write_bytes(b"x")
    (root / step_folder(2) / "stray").write_bytes(b"x")
    (root / step_folder(2) / "manifest.json").write_bytes(b"{")
    assert found(root) == {f"{step_folder(1)}/stray": UnreferencedKind.FILE}
