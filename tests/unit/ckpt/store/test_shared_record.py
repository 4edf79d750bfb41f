"""A shared record: no change is lost, and a damaged file is named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from holdfast.ckpt.errors import CorruptError, StoreError
from holdfast.ckpt.store.local import LocalStore
from holdfast.ckpt.store.shared_record import SharedRecord


class Names(msgspec.Struct, frozen=True):
    """The names of those who wrote."""

    names: tuple[str, ...] = ()


RECORD = SharedRecord(
    path="names.json", kind=Names, absent=Names(), damaged="not names ({}); remove it"
)


def with_name(name: str, store: LocalStore) -> Names:
    return RECORD.change(store, lambda known: Names((*known.names, name)))


def test_changes_of_many_are_all_kept(tmp_path: Path) -> None:
    names = [str(number) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: with_name(name, LocalStore(tmp_path)), names))
    assert sorted(RECORD.load(LocalStore(tmp_path)).names) == names


def test_what_stays_as_it_is_is_not_written(tmp_path: Path) -> None:
    assert RECORD.change(LocalStore(tmp_path), lambda known: known) == Names()
    assert not (tmp_path / "names.json").exists()


def test_a_change_that_others_always_overtake_is_given_up_by_name(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    depth = 0

    def slow(known: Names) -> Names:
        nonlocal depth
        depth += 1
        with_name(str(depth), store)
        return Names((*known.names, "slow"))

    with pytest.raises(StoreError, match=r"names\.json: others kept changing it"):
        RECORD.change(store, slow)
    assert "slow" not in RECORD.load(store).names


@pytest.mark.parametrize("data", [b"", b"{", b'{"names": [1]}', b"\xff"])
def test_a_damaged_record_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "names.json").write_bytes(data)
    with pytest.raises(CorruptError, match=r"names\.json: not names \(.*\); remove it"):
        RECORD.load(LocalStore(tmp_path))
