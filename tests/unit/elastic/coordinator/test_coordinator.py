"""The coordinator's implementations, in the suite of all coordinators."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from coordinator_conformance import CoordinatorConformance
from doubles.memory_coordinator import MemoryCoordinator
from newer_peer import newer_handler

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import Client, RunKey, Server
from holdfast.elastic.coordinator.base import Coordinator, EventKind
from holdfast.elastic.coordinator.clock import VirtualClock
from holdfast.elastic.coordinator.embedded import EmbeddedCoordinator, EmbeddedServer
from holdfast.elastic.coordinator.memory import KeyValueTable
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError


class TestMemory(CoordinatorConformance):
    @pytest.fixture
    def coordinator(self) -> Coordinator:
        return MemoryCoordinator()


class TestEmbedded(CoordinatorConformance):
    @pytest.fixture
    def coordinator(self) -> Iterator[Coordinator]:
        key = RunKey.new()
        server = EmbeddedServer(key)
        client = EmbeddedCoordinator(server.address, key)
        yield client
        client.close()
        server.close()


@pytest.fixture
def embedded() -> Iterator[tuple[EmbeddedServer, RunKey]]:
    key = RunKey.new()
    server = EmbeddedServer(key)
    yield server, key
    server.close()


def test_clients_of_one_server_share_the_table(embedded: tuple[EmbeddedServer, RunKey]) -> None:
    server, key = embedded
    one, two = (EmbeddedCoordinator(server.address, key) for _ in range(2))
    assert one.compare_and_set("r/g", "1", expected=0)
    assert not two.compare_and_set("r/g", "2", expected=0)
    one.close()
    two.close()


def test_an_error_of_a_later_version_is_the_coordinators_with_its_message() -> None:
    key = RunKey.new()
    server = Server(newer_handler, key=key)
    client = EmbeddedCoordinator(server.address, key)
    with pytest.raises(CoordinatorError, match=r"^get: told by a later version$"):
        client.get("r/g")
    client.close()
    server.close()


def test_port_in_use_is_said_clearly(embedded: tuple[EmbeddedServer, RunKey]) -> None:
    server, key = embedded
    with pytest.raises(CoordinatorError, match="free the port or choose another"):
        EmbeddedServer(key, bind=server.address)


def test_foreign_key_is_not_served(embedded: tuple[EmbeddedServer, RunKey]) -> None:
    server, _ = embedded
    stranger = EmbeddedCoordinator(server.address, RunKey.new(), timeout_s=0.3)
    with pytest.raises(CoordinatorError, match="does not answer"):
        stranger.get("r/a")
    stranger.close()


def test_malformed_requests_are_refused(embedded: tuple[EmbeddedServer, RunKey]) -> None:
    server, key = embedded
    client = Client(server.address, key)
    for op, body, text in (
        ("put", {"key": 3}, "malformed"),
        ("put", {"colour": "red"}, "malformed"),
        ("keep_alive", {}, "no lease"),
        ("dance", {}, "no operation"),
    ):
        with pytest.raises(PeerError, match=text):
            client.call(op, body)
    client.close()


def test_close_ends_a_watch_of_another_thread(embedded: tuple[EmbeddedServer, RunKey]) -> None:
    server, key = embedded
    coordinator = EmbeddedCoordinator(server.address, key)
    began = threading.Event()

    def watch() -> None:
        began.set()
        coordinator.watch("r/", after=0, timeout_s=60)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    began.wait(5)
    coordinator.close()
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(CoordinatorError):
        coordinator.get("r/a")
    with pytest.raises(CoordinatorError, match="closed"):
        coordinator.watch("r/", after=0, timeout_s=0)


def test_pause_of_the_server_ends_no_lease() -> None:
    clock = VirtualClock()
    key = RunKey.new()
    server = EmbeddedServer(key, clock=clock)
    coordinator = EmbeddedCoordinator(server.address, key)
    lease = coordinator.grant(1.0)
    clock.advance(30)
    coordinator.keep_alive(lease)
    coordinator.close()
    server.close()


def test_lease_ends_at_its_time_exactly() -> None:
    table = KeyValueTable()
    lease = table.grant(1.0, now_s=10.0)
    table.put("r/a", "1", lease=lease)
    assert table.expire(10.99) == []
    table.keep_alive(lease, now_s=10.99)
    assert table.next_expiry_s() == pytest.approx(11.99)
    assert table.expire(11.98) == []
    assert table.expire(11.99) == [lease]
    assert table.get("r/a") is None
    with pytest.raises(LeaseExpiredError):
        table.keep_alive(lease, now_s=12.0)
    assert table.next_expiry_s() is None


@pytest.mark.parametrize("bounds", [{"max_history_events": 10}, {"max_history_bytes": 50}])
def test_watcher_that_fell_behind_is_told_to_read_again(bounds: dict[str, int]) -> None:
    table = KeyValueTable(**bounds)
    for i in range(100):
        table.put("r/a", f"{i:03}")
    assert [e.kind for e in table.events("r/", after=0)] == [EventKind.RESET]
    assert [e.value for e in table.events("r/", after=98)] == ["098", "099"]
    assert table.events("r/", after=100) == []


def test_history_has_no_hole_at_its_bound() -> None:
    table = KeyValueTable(max_history_events=10)
    for i in range(57):
        table.put("r/a", str(i))
        for after in range(table.revision + 1):
            events = table.events("r/", after=after)
            if [e.kind for e in events] != [EventKind.RESET]:
                assert [e.revision for e in events] == list(range(after + 1, table.revision + 1))


def test_value_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.elastic.coordinator.memory.MAX_VALUE_BYTES", 10)
    with pytest.raises(CoordinatorError, match="at most 10"):
        KeyValueTable().put("r/a", "x" * 11)
