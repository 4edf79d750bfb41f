"""A journaled table is the same after the death of its process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator_conformance import CoordinatorConformance

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.base import Coordinator, EventKind
from holdfast.elastic.coordinator.clock import VirtualClock
from holdfast.elastic.coordinator.embedded import EmbeddedCoordinator, EmbeddedServer
from holdfast.elastic.coordinator.journal import ChangeKind, Journal, TableChange
from holdfast.elastic.coordinator.memory import KeyValueTable
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError

CHANGES = [
    TableChange(kind=ChangeKind.GRANT, lease=1, ttl_s=2.5),
    TableChange(kind=ChangeKind.PUT, key="r/ä", value='{"x": 1}\n', revision=1, lease=1),
    TableChange(kind=ChangeKind.DELETE, key="r/ä", revision=2),
    TableChange(kind=ChangeKind.END, lease=1),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def _written(path: Path) -> None:
    journal = Journal(path)
    for change in CHANGES:
        journal.append(change)
    journal.close()


class TestEmbeddedWithJournal(CoordinatorConformance):
    @pytest.fixture
    def coordinator(self, path: Path) -> Iterator[Coordinator]:
        key = RunKey.new()
        server = EmbeddedServer(key, journal=path)
        client = EmbeddedCoordinator(server.address, key)
        yield client
        client.close()
        server.close()


def test_what_was_appended_is_loaded(path: Path) -> None:
    _written(path)
    assert path.stat().st_mode & 0o777 == 0o600
    journal = Journal(path)
    assert journal.load() == CHANGES
    assert journal.size_bytes == path.stat().st_size
    journal.close()


def test_a_torn_last_line_is_cut_off_at_every_byte(path: Path) -> None:
    _written(path)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        journal = Journal(path)
        complete = sum(end <= length for end in ends)
        assert journal.load() == CHANGES[:complete]
        journal.append(CHANGES[complete])
        journal.close()
        again = Journal(path)
        assert again.load() == CHANGES[: complete + 1]
        again.close()


def test_damage_elsewhere_is_an_error_that_names_the_line(path: Path) -> None:
    _written(path)
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"put") + 1] ^= 1
    path.write_bytes(whole)
    journal = Journal(path)
    with pytest.raises(CoordinatorError, match="line 2 is damaged"):
        journal.load()
    journal.close()
    with pytest.raises(CoordinatorError, match="line 2 is damaged"):
        EmbeddedServer(RunKey.new(), journal=path)
    Journal(path).close()  # the server let it go


def test_one_process_at_a_time(path: Path) -> None:
    journal = Journal(path)
    with pytest.raises(CoordinatorError, match="another process serves"):
        Journal(path)
    journal.rewrite(CHANGES)
    with pytest.raises(CoordinatorError, match="another process serves"):
        Journal(path)
    journal.close()
    Journal(path).close()


def test_a_full_disk_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, journal = KeyValueTable(), Journal(path)
    table.write_down = journal.append
    lease = table.grant(1.0, now_s=0.0)
    table.put("r/a", "1", lease=lease)
    before, written = table.changes(), path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, line: write(fd, line[:5]))
    for change in (
        lambda: table.put("r/b", "2"),
        lambda: table.compare_and_set("r/a", "2", expected=1),
        lambda: table.delete("r/a"),
        lambda: table.grant(1.0, now_s=0.0),
        lambda: table.revoke(lease),
        lambda: table.expire(5.0),
    ):
        with pytest.raises(CoordinatorError, match="make room"):
            change()
        assert table.changes() == before
        assert path.read_bytes() == written
    monkeypatch.undo()
    assert table.expire(5.0) == [lease]
    journal.close()


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CoordinatorError, match="choose another run directory"):
        Journal(tmp_path / "absent" / "journal")


def test_a_server_that_comes_back_is_the_same_one(path: Path) -> None:
    key, clock = RunKey.new(), VirtualClock()
    server = EmbeddedServer(key, journal=path, clock=clock)
    client = EmbeddedCoordinator(server.address, key)
    lease, ended = client.grant(1.0), client.grant(60.0)
    client.put("r/node", "1", lease=lease)
    assert client.compare_and_set("r/generation", "1", expected=0)
    client.revoke(ended)
    _, after = client.range("r/")
    client.put("r/later", "1")
    server.close()
    clock.advance(30.0)  # nobody could keep a lease alive
    server = EmbeddedServer(key, bind=server.address, journal=path, clock=clock)
    entry = client.get("r/generation")
    assert entry is not None
    assert not client.compare_and_set("r/generation", "1", expected=0)
    assert client.compare_and_set("r/generation", "2", expected=entry.revision)
    client.keep_alive(lease)
    with pytest.raises(LeaseExpiredError):
        client.keep_alive(ended)
    assert client.grant(60.0) not in (lease, ended)
    events, _ = client.watch("r/", after=after, timeout_s=5)
    assert [(event.key, event.value) for event in events] == [
        ("r/later", "1"),
        ("r/generation", "2"),
    ]
    for _ in range(5):  # a longer step would be a pause
        clock.advance(0.25)
        found = client.get("r/node")
    assert found is None, "the lease ends in its own time"
    client.close()
    server.close()


def test_a_journal_does_not_grow_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.elastic.coordinator.embedded._JOURNAL_BYTES", 4096)
    key = RunKey.new()
    server = EmbeddedServer(key, journal=path)
    client = EmbeddedCoordinator(server.address, key)
    lease = client.grant(60.0)
    client.put("r/leased", "1", lease=lease)
    _, old = client.range("")
    inode, turn = path.stat().st_ino, 0
    while path.stat().st_ino == inode:
        turn += 1
        revision = client.put("r/a", str(turn))
    server.close()
    server = EmbeddedServer(key, bind=server.address, journal=path)
    entries, newest = client.range("r/")
    assert {(e.key, e.lease) for e in entries} == {("r/a", None), ("r/leased", lease)}
    assert newest == max(entry.revision for entry in entries) == revision
    events, _ = client.watch("r/", after=old, timeout_s=5)
    assert [event.kind for event in events] == [EventKind.RESET]
    assert client.put("r/a", "end") == newest + 1
    client.close()
    server.close()


def test_a_coordinator_that_goes_on_without_room_never_serves_an_incomplete_journal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, full = RunKey.new(), True

    class Full(Journal):
        def append(self, change: TableChange) -> None:
            if full:
                raise CoordinatorError("no space left")
            super().append(change)

        def rewrite(self, changes: list[TableChange]) -> None:
            if full:
                raise CoordinatorError("no space left")
            super().rewrite(changes)

    monkeypatch.setattr("holdfast.elastic.coordinator.embedded.Journal", Full)
    monkeypatch.setattr("holdfast.elastic.coordinator.embedded._CATCH_UP_S", 0.01)
    full = False
    server = EmbeddedServer(key, journal=path, goes_on=True)
    client = EmbeddedCoordinator(server.address, key)
    client.put("r/a", "1")
    full = True
    revision = client.put("r/a", "2")
    assert server.value("r/a") == "2"
    with pytest.raises(CoordinatorError, match="line 1 is damaged"):
        _loaded(path)
    full = False
    while not path.stat().st_size > len(b"incomplete\n"):
        client.get("r/a")
    newest = client.put("r/b", "3")
    client.close()
    server.close()
    table = KeyValueTable()
    table.replay(_loaded(path), now_s=0.0)
    assert (table.revision, newest) == (revision + 1, revision + 1)
    assert [(entry.key, entry.value) for entry in table.range("r/")[0]] == [
        ("r/a", "2"),
        ("r/b", "3"),
    ]


def _loaded(path: Path) -> list[TableChange]:
    """Read a copy: another process may hold the file itself."""
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    journal = Journal(copy)
    try:
        return journal.load()
    finally:
        journal.close()
