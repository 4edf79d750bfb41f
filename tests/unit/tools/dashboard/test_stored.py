"""The checkpoints of a store are listed with the result of the quick check and the pins."""

from __future__ import annotations

from pathlib import Path

import torch

import holdfast
from holdfast.ckpt.checkpoints import pins
from holdfast.ckpt.store.places import open_store
from holdfast.tools.dashboard.stored import Shelf


def saved(root: Path, *steps: int) -> None:
    for step in steps:
        holdfast.save(root, {"x": torch.arange(8)}, step=step)


def test_steps_are_sound_damaged_unfinished_or_pinned(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    pins.update(open_store(tmp_path), there=[10, 20, 30], pin=[10], host="h", now_s=1.0)
    pack = next((tmp_path / "step-000000000020").rglob("*.pack"))
    pack.write_bytes(pack.read_bytes()[:-1])
    (tmp_path / "step-000000000040").mkdir()
    shelf = Shelf(str(tmp_path))
    shelf.look()
    found = {each.step: (each.state, each.pinned) for each in shelf.found.newest}
    assert found == {
        40: ("unfinished", False),
        30: ("sound", False),
        20: ("damaged", False),
        10: ("sound", True),
    }
    assert shelf.found.committed == 3
    assert [each.step for each in shelf.found.newest] == [40, 30, 20, 10]
    assert all(each.size_bytes for each in shelf.found.newest if each.state == "sound")


def test_the_store_is_listed_now_and_then(tmp_path: Path) -> None:
    now_s = 0.0
    saved(tmp_path, 1)
    shelf = Shelf(str(tmp_path), clock=lambda: now_s)
    shelf.look()
    saved(tmp_path, 2)
    shelf.look()
    assert shelf.found.committed == 1
    now_s = 60.0
    shelf.look()
    assert shelf.found.committed == 2


def test_a_store_that_cannot_be_listed_says_why(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    shelf = Shelf(str(file))
    shelf.look()
    assert shelf.found.error
