"""Steps are found whatever lies beside them, and whatever another process removes meanwhile."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from doubles.pruning import prune

from holdfast import ckpt
from holdfast.ckpt.checkpoints import catalog
from holdfast.ckpt.errors import ArgumentError, CorruptError, NotFoundError, StoreError
from holdfast.ckpt.format.manifest import MANIFEST
from holdfast.ckpt.store.local import LocalStore

STEPS = 3


def save(root: Path, step: int) -> None:
    ckpt.save(root, {"w": torch.full((4,), float(step))}, step=step)


def loaded(root: Path, step: int | None = None) -> tuple[int, float]:
    state = {"w": torch.zeros(4)}
    report = ckpt.load(root, state, step=step)
    return report.step, state["w"][0].item()


def opened(root: Path) -> tuple[int, float]:
    with ckpt.open(root) as found:
        return found.step, found["w"][0].item()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in range(1, STEPS + 1):
        save(tmp_path, step)
    return tmp_path


class Overtaken(LocalStore):
    """A directory in which every step that is looked at is gone by then, ``times`` times."""

    times = 0
    at = MANIFEST

    def read(self, name: str, **options: int) -> bytes:
        if Overtaken.times and Overtaken.at in name:
            Overtaken.times -= 1
            newest = max(int(each.name.removeprefix("step-")) for each in Path(self.root).iterdir())
            for each in list(Path(self.root).iterdir()):
                shutil.rmtree(each)
            with mock.patch.object(Overtaken, "times", 0):
                save(Path(self.root), newest + 1)
        return super().read(name, **options)


@pytest.mark.parametrize("at", [MANIFEST, "index/"])
@pytest.mark.parametrize("read", [loaded, opened])
def test_a_step_is_found_although_all_that_were_listed_are_gone(
    root: Path, at: str, read: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.ckpt.store.places.LocalStore", Overtaken)
    for times in (1, 2, 5):
        monkeypatch.setattr(Overtaken, "times", times)
        monkeypatch.setattr(Overtaken, "at", at)
        step, value = read(root)  # type: ignore[operator]
        assert (step, Overtaken.times) == (int(value), 0)
        assert step > STEPS


def test_a_root_without_any_sound_step_is_listed_once_more_and_no_more(root: Path) -> None:
    for manifest in root.glob(f"*/{MANIFEST}"):
        manifest.write_bytes(b"damaged")
    with pytest.raises(CorruptError, match="checksum"):
        loaded(root)
    with pytest.raises(CorruptError, match="checksum"):
        opened(root)


def test_a_file_with_the_name_of_a_step_stops_nobody(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "step-000000000009").touch()
    with caplog.at_level(logging.WARNING):
        assert loaded(root) == (3, 3.0)
    assert "step-000000000009 is a file, not the directory of a step" in caplog.text
    assert loaded(root, 1) == (1, 1.0)
    assert opened(root) == (3, 3.0)
    ckpt.save(root, {"w": torch.full((4,), 4.0)}, step=4, base="latest")
    assert prune(root, keep_last=1) == [1, 2, 3]
    assert loaded(root) == (4, 4.0)
    with pytest.raises(NotFoundError, match="no checkpoint of step 9; steps there: 4"):
        loaded(root, 9)


class Closed(LocalStore):
    """A directory, one step of which may not be listed."""

    def names(self, prefix: str) -> list[str]:
        if prefix.startswith("step-000000000003"):
            error = PermissionError(13, "Permission denied")
            raise StoreError(f"{prefix}: cannot list it: Permission denied") from error
        return super().names(prefix)


def test_a_step_that_may_not_be_listed_stops_no_other_and_loses_no_pack(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.save(root, {"w": torch.full((4,), 2.0)}, step=3, base=2)  # needs the pack of step 2
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.ckpt.store.places.LocalStore", Closed)
        assert loaded(root) == (2, 2.0)
        assert opened(root) == (2, 2.0)
        ckpt.save(root, {"w": torch.full((4,), 4.0)}, step=4)
        assert prune(root, keep_last=1) == [1, 2]
    assert loaded(root, 3) == (3, 2.0), "its base is there"
    for step in (1, 2, 4):
        shutil.rmtree(root / catalog.step_folder(step))
    monkeypatch.setattr("holdfast.ckpt.store.places.LocalStore", Closed)
    with pytest.raises(NotFoundError, match=r"step 3 cannot be read: .*Permission denied"):
        loaded(root)


def test_other_trouble_with_a_listing_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(self: LocalStore, prefix: str) -> list[str]:
        if prefix:
            raise StoreError(f"{prefix}: cannot list it: Stale file handle") from OSError(116, "")
        return [catalog.step_folder(1)]

    monkeypatch.setattr(LocalStore, "names", names)
    with pytest.raises(StoreError, match="Stale"):
        loaded(root)


@pytest.mark.parametrize("step", ["3", 3.0, True])
def test_a_step_that_is_no_number_is_told_so(root: Path, step: object) -> None:
    with pytest.raises(ArgumentError, match=f"step is {step!r}; give a whole number"):
        ckpt.load(root, {"w": torch.zeros(4)}, step=step)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=f"step is {step!r}; give a whole number"):
        ckpt.open(root, step=step)  # type: ignore[arg-type]
