"""Files of failed and killed saves are removed, and those of a living one are not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast.ckpt.api
from holdfast import ckpt
from holdfast.ckpt.checkpoints.attempts import SaveAttempt, remove_remains
from holdfast.ckpt.checkpoints.catalog import committed_steps, step_folder
from holdfast.ckpt.checkpoints.retention import prune, remove
from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.local import LocalStore


def state(seed: float) -> dict[str, Any]:
    return {"frozen": torch.zeros(5000), "w": torch.full((5000,), seed)}


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def steps_with_files(root: Path) -> set[str]:
    return {name.partition("/")[0] for name in files(root)}


def in_child(work: Callable[[], Any]) -> int:
    """Run ``work`` in a child that is killed in it, or ends; return its exit code."""
    if (child := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dying(name: str) -> Callable[..., Any]:
    def die(*_: Any, **__: Any) -> None:
        os._exit(9)

    return die


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "root"
    for step in (1, 2):
        ckpt.save(place, state(step), step=step)
    return place


def test_a_save_whose_base_is_removed_meanwhile_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = holdfast.ckpt.api.commit

    def racing(*args: Any, **how: Any) -> None:
        remove(root, 1)
        real(*args, **how)

    monkeypatch.setattr("holdfast.ckpt.api.commit", racing)
    with pytest.raises(StoreError, match="save again"):
        ckpt.save(root, state(3), step=3, base=1)
    assert steps_with_files(root) == {step_folder(1), step_folder(2)}  # pinned a moment ago
    monkeypatch.undo()
    for step in (3, 4):
        ckpt.save(root, state(step), step=step)
    assert prune(root, keep_last=1) == [2, 3]
    assert steps_with_files(root) == {step_folder(4)}


@pytest.mark.parametrize("call", ["writev", "fsync", "rename"])
def test_a_full_disk_leaves_nothing(call: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real, count = files(root), getattr(os, call), 0

    def full(*args: Any, **how: Any) -> Any:
        nonlocal count
        count += 1
        if count >= fails_from:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **how)

    for fails_from in range(1, 20):
        count = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            try:
                ckpt.save(root, state(3), step=3)
            except StoreError as error:
                assert "make room" in str(error)
            else:
                break
        if committed_steps(root) == [1, 2]:
            assert files(root) == before, fails_from
    assert committed_steps(root) == [1, 2, 3]


def test_a_killed_save_is_cleared_by_the_next_one_and_by_prune(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(root)
    monkeypatch.setattr("holdfast.ckpt.api.commit", dying("commit"))
    assert in_child(lambda: ckpt.save(root, state(3), step=3, base=2)) == 9
    assert in_child(lambda: ckpt.save(root, state(2.5), step=2)) == 9
    monkeypatch.undo()
    left = {name.partition("-g")[0] for name in files(root) - before}
    assert {f"{step_folder(step)}/data/00000" for step in (2, 3)} <= left
    prune(root, keep_last=2)
    assert files(root) == before
    assert not (root / step_folder(3)).exists()
    monkeypatch.setattr("holdfast.ckpt.api.commit", dying("commit"))
    assert in_child(lambda: ckpt.save(root, state(2.5), step=2)) == 9
    monkeypatch.undo()
    ckpt.save(root, state(2), step=2)
    assert len(files(root)) == len(before)


def test_what_a_living_save_has_written_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = holdfast.ckpt.api.commit

    def pruned(*args: Any, **how: Any) -> None:
        prune(root, keep_last=2)
        remove_remains(LocalStore(root))
        real(*args, **how)

    monkeypatch.setattr("holdfast.ckpt.api.commit", pruned)
    ckpt.save(root, state(3), step=3, base=2)
    found = state(0)
    ckpt.load(root, found)
    assert torch.equal(found["w"], state(3)["w"])


def test_a_refused_save_leaves_no_folder(tmp_path: Path) -> None:
    with SaveAttempt(tmp_path / "a/b", 1):
        assert (tmp_path / "a/b" / step_folder(1)).is_dir()
    assert list(tmp_path.iterdir()) == []


def test_files_of_runs_are_left_to_their_generations(root: Path) -> None:
    folder = root / step_folder(2)
    names = ["data/00000-g3-1d9b8c04-aa.pack", "index/00000-g0-1d9b8c04-aa.json", "data/mine"]
    for name in names:
        (folder / name).write_bytes(b"")
    remove_remains(LocalStore(root))
    assert all((folder / name).exists() for name in names)


def test_two_processes_of_one_number_do_not_meet(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the saver that is started again has the number of the one that was killed."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(Path, "rename", dying("rename"))
    assert in_child(lambda: ckpt.save(root, state(3), step=3)) == 9
    monkeypatch.undo()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert any(name.endswith(".tmp") for name in files(root))
    ckpt.save(root, state(3), step=3)
    assert committed_steps(root) == [1, 2, 3]
    assert not any(name.endswith(".tmp") for name in files(root))
