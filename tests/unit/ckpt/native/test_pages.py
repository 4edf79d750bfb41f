"""Pages of slots: filled ahead, huge if the kernel supports it, refused if there is no space."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from holdfast.ckpt.errors import CapacityError
from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.native import pages


@pytest.mark.parametrize(
    ("mode", "huge"),
    [
        ("always within_size advise [never] deny force", False),
        ("always within_size [advise] never deny force", True),
        ("always [within_size] advise never deny force", True),
        ("[always] within_size advise never deny force", True),
        ("always within_size advise never [deny] force", False),
    ],
)
def test_huge_pages_are_used_where_the_kernel_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, huge: bool
) -> None:
    said = tmp_path / "shmem_enabled"
    said.write_text(mode)
    monkeypatch.setattr(pages, "SHMEM_HUGE", said)
    assert pages.huge_pages() is huge
    slot = SlotFile.create(tmp_path / "a.slot", 3 << 20)
    slot.block(1000)[:] = bytes(range(250)) * 4
    again = SlotFile.open(tmp_path / "a.slot")
    assert bytes(again.block(1000)) == bytes(range(250)) * 4
    found = (tmp_path / "a.slot").stat()
    assert found.st_blocks * 512 >= 3 << 20, "every page is allocated"


def test_a_kernel_without_them_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "SHMEM_HUGE", tmp_path / "absent")
    assert not pages.huge_pages()


def resident_bytes(mapping: mmap.mmap) -> int:
    """Return the resident bytes of this process's one mapping of that size."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    size = f"Size: {len(mapping) // 1024:>18} kB".split()
    at = next(n for n, line in enumerate(lines) if line.split() == size)
    rss = next(line for line in lines[at:] if line.startswith("Rss:"))
    return int(rss.split()[1]) * 1024


def test_a_populated_mapping_does_not_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.slot"
    nbytes = (5 << 20) + 12288
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    pages.allocate(fd, nbytes)
    mapping = pages.map_pages(fd)
    os.close(fd)
    assert resident_bytes(mapping) == 0
    assert pages.populate(mapping, at=(1 << 20) + 5, nbytes=3 << 20)
    assert 3 << 20 < resident_bytes(mapping) < nbytes
    assert pages.populate(mapping)
    assert resident_bytes(mapping) == nbytes
    mapping.close()


def test_no_room_is_said_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match="no room for a snapshot slot"):
        SlotFile.create(tmp_path / "a.slot", 1000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 4, 5])
def test_who_makes_a_file_may_stop_between_any_two_pieces(tmp_path: Path, pieces: int) -> None:
    class Stop(Exception):
        pass

    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks > pieces:
            raise Stop

    size = 3 * pages._AT_ONCE_BYTES
    with pytest.raises(Stop):
        pages.make_file(tmp_path / "a", size, check=check)
    assert list(tmp_path.iterdir()) == []
    before = f"{tmp_path / 'a'} (deleted)"
    assert before not in Path("/proc/self/maps").read_text(), "its memory is free"


def test_other_threads_may_map_memory_while_a_file_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel locks all maps of a process for each call that fills pages."""
    requests: list[int] = []
    advise = pages._advise

    def note(address: int, nbytes: int, advice: int) -> bool:
        requests.append(nbytes)
        return advise(address, nbytes, advice)

    monkeypatch.setattr(pages, "_advise", note)
    size = 5 * pages._AT_ONCE_BYTES + 4096
    mapping = pages.make_file(tmp_path / "a", size)
    assert max(requests) == pages._AT_ONCE_BYTES
    assert sum(requests) == size
    assert resident_bytes(mapping) == size
    mapping.close()


def test_dropped_pages_leave_the_page_table_and_keep_their_bytes(tmp_path: Path) -> None:
    size = pages._AT_ONCE_BYTES + 4096
    mapping = pages.make_file(tmp_path / "a", size)
    mapping[-3:] = b"abc"
    pages.drop(mapping)
    assert resident_bytes(mapping) == 0
    assert mapping[-3:] == b"abc"
    mapping.close()
