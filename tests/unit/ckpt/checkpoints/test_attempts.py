"""Files of failed and killed saves are removed, and those of a living one are not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.memory_store import MemoryStore
from doubles.pruning import prune, remove
from fault_stores import using
from run_saves import publish, written

import holdfast.ckpt.api
from holdfast import ckpt
from holdfast.ckpt.checkpoints import fence
from holdfast.ckpt.checkpoints.attempts import (
    NONE_ENDED,
    EndedSaves,
    SaveAttempt,
    remove_all_remains,
    remove_remains,
)
from holdfast.ckpt.checkpoints.catalog import (
    committed,
    committed_steps,
    folders,
    quick_verify,
    run_tag,
    step_folder,
    written_by,
)
from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.base import Store
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
        remove_all_remains(LocalStore(root))
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


def test_files_of_a_run_that_may_publish_yet_stay(root: Path) -> None:
    folder = root / step_folder(2)
    names = ["data/00000-g3-1d9b8c04-aa.pack", "index/00000-g0-1d9b8c04-aa.json", "data/mine"]
    for name in names:
        (folder / name).write_bytes(b"")
    remove_all_remains(LocalStore(root))
    assert all((folder / name).exists() for name in names)


@pytest.mark.parametrize(
    ("generation", "step", "ended"),
    [(2, 9, True), (3, 5, True), (2, 99, True), (3, 6, False), (3, 7, False), (4, 1, False)],
)
def test_a_save_has_ended_when_its_run_has_come_to_a_later_one(
    generation: int, step: int, ended: bool
) -> None:
    path = f"data/00001-g{generation}-{run_tag('a')}-00.pack"
    assert EndedSaves(reached={run_tag("a"): (3, 6)}).include(path, step=step) is ended
    assert not EndedSaves(reached={run_tag("b"): (9, 9)}).include(path, step=step)
    assert EndedSaves(fenced=frozenset({run_tag("a")})).include(path, step=step)
    assert not NONE_ENDED.include(path, step=step)


def with_files(store: Store) -> list[int]:
    return [info.step for info in folders(store) if store.names(f"{step_folder(info.step)}/data")]


class TestSavesOfRuns:
    @pytest.fixture(params=["directory", "objects"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
        store: Store = MemoryStore() if request.param == "objects" else LocalStore(tmp_path)
        with using(store):
            yield store

    def test_a_failed_one_is_removed_by_its_run_when_it_writes_another(self, store: Store) -> None:
        publish(store.root, "a", 2, 10)
        for step in (20, 40):
            written(store.root, "a", 2, step)
        now = EndedSaves(reached={run_tag("a"): (2, 30)})
        remove_remains(store, steps=[10, 20, 40], ended=now)
        assert with_files(store) == [10, 40]
        assert committed(store) == [10]

    def test_prune_leaves_those_of_the_run_that_has_the_fence(self, store: Store) -> None:
        """It may have begun again from an earlier step, under its old name."""
        publish(store.root, "a", 2, 30)
        written(store.root, "a", 1, 20)
        prune(store.root, keep_last=9)
        assert with_files(store) == [20, 30]

    def test_a_failed_one_is_removed_once_another_run_has_the_fence(self, store: Store) -> None:
        publish(store.root, "a", 2, 10)
        written(store.root, "a", 2, 20)
        fence.take(store, run="b", generation=1)
        written(store.root, "b", 1, 20)
        prune(store.root, keep_last=9)
        assert [written_by(name) for name in store.names(f"{step_folder(20)}/data")] == [
            (1, run_tag("b"))
        ]

    def test_they_go_as_soon_as_a_later_run_commits_their_step(self, store: Store) -> None:
        fence.take(store, run="a", generation=2)
        written(store.root, "a", 2, 10)
        publish(store.root, "b", 1, 10)
        written(store.root, "c", 1, 10)  # of a run that may still take the fence
        publish(store.root, "b", 1, 10)
        writers = {written_by(name) for name in store.names(f"{step_folder(10)}/data")}
        assert writers == {(1, run_tag("b")), (1, run_tag("c"))}
        quick_verify(store, 10)

    def test_the_files_of_published_ones_stay(self, store: Store) -> None:
        for step in (10, 20, 30):
            publish(store.root, "a", 2, step)
        fence.take(store, run="b", generation=1)
        remove_all_remains(store)
        for step in (10, 20, 30):
            quick_verify(store, step)


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
