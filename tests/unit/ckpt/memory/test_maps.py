"""Slots stay mapped while their file lives, and no longer; reading them needs no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.maps import SlotMaps


def make(path: Path) -> str:
    SlotFile.create(path, 1000).close()
    return str(path)


def test_a_slot_is_mapped_once(tmp_path: Path) -> None:
    maps, path = SlotMaps(), make(tmp_path / "1.slot")
    assert maps.open(path) is maps.open(path)
    maps.close()


def test_a_slot_is_warmed_for_the_first_who_wants_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[tuple[int, int]] = []
    monkeypatch.setattr(SlotFile, "warm_part", lambda _, at, nbytes: filled.append((at, nbytes)))
    maps, path = SlotMaps(), make(tmp_path / "1.slot")
    slot = maps.open(path, warm=False)
    assert not slot.is_warm and not filled
    assert maps.open(path) is slot and slot.is_warm and filled == [(0, slot.capacity)]
    assert maps.open(path) is maps.open(path, warm=False) is slot
    maps.map_ahead([path])
    maps.close()
    assert len(filled) == 1


def test_what_is_mapped_ahead_is_warm_even_if_it_was_mapped(tmp_path: Path) -> None:
    maps, path = SlotMaps(), make(tmp_path / "1.slot")
    slot = maps.open(path, warm=False)
    maps.map_ahead([path])
    maps._ahead.shutdown() if maps._ahead else None
    assert slot.is_warm
    maps.close()


def test_a_file_that_was_replaced_is_mapped_anew_and_a_removed_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, path, other = SlotMaps(), make(tmp_path / "1.slot"), make(tmp_path / "2.slot")
    usage = shutil.disk_usage(tmp_path)._replace(used=1 << 30, free=1 << 30)
    monkeypatch.setattr("holdfast.ckpt.memory.arena.shutil.disk_usage", lambda _: usage)
    first = maps.open(path)
    Path(path).rename(tmp_path / "old")
    make(Path(path))
    assert maps.open(path) is not first
    Path(path).unlink()
    maps.open(other)
    assert path in maps._slots, "there is room: nobody has to wait for it to be unmapped"
    maps.prune()
    assert list(maps._slots) == [other]
    with pytest.raises(PeerError, match=r"1\.slot: slot cannot be mapped"):
        maps.open(path)
    maps.close()


def test_what_is_gone_is_unmapped_at_once_where_memory_is_scarce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, path, other = SlotMaps(), make(tmp_path / "1.slot"), make(tmp_path / "2.slot")
    maps.open(path)
    Path(path).unlink()
    usage = shutil.disk_usage(tmp_path)._replace(used=1000, free=999)
    monkeypatch.setattr("holdfast.ckpt.memory.arena.shutil.disk_usage", lambda _: usage)
    maps.open(other)
    assert list(maps._slots) == [other]
    maps.close()


def test_slots_are_unmapped_later_and_not_under_who_still_reads_them(tmp_path: Path) -> None:
    maps, path = SlotMaps(), make(tmp_path / "1.slot")
    slot = maps.open(path)
    slot.block(3)[:] = b"abc"
    read = slot.block(3)
    before = set(threading.enumerate())
    maps.close_later()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert maps._slots == {} and bytes(read) == b"abc"
    del read, slot
    assert path not in Path("/proc/self/maps").read_text()


def test_slots_are_mapped_ahead_on_another_thread(tmp_path: Path) -> None:
    maps = SlotMaps()
    paths = [make(tmp_path / "1.slot"), make(tmp_path / "2.slot"), str(tmp_path / "absent.slot")]
    maps.map_ahead(paths)
    maps.map_ahead(paths)
    maps._ahead.shutdown() if maps._ahead else None
    assert list(maps._slots) == paths[:2]
    first = maps._slots[paths[0]][1]
    assert maps.open(paths[0]) is first
    maps.close()
    maps.map_ahead(paths)
    assert maps._slots == {}


def test_planning_and_reading_need_no_torch() -> None:
    code = (
        "import sys, holdfast.ckpt.recovery.memory_source, holdfast.ckpt.memory.maps;"
        "import holdfast.ckpt.geometry.reshard, holdfast.ckpt.state.plain;"
        "import holdfast.ckpt.geometry.layout, holdfast.ckpt.state.names;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
