"""The door of a server's socket: shut for a crowd, open again when it is gone."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest
import zmq

from holdfast.ckpt.transport import door
from holdfast.ckpt.transport.door import Door
from holdfast.ckpt.transport.sockets import OwnContext

WAIT_S = 60.0


class Listening:
    """A ROUTER socket with a door; the test looks, and sets the time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.context = OwnContext()
        self.router = self.context.socket(zmq.ROUTER)
        self.door = Door(self.router, clock=lambda: self.now_s)
        self.router.bind("tcp://127.0.0.1:*")
        self.port = int(self.router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def look_until(self, shut: bool) -> None:
        while self.door.shut is not shut:
            assert self.door.monitor.poll(WAIT_S * 1000)
            self.door.look()

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT_S)

    def is_held_back(self) -> bool:
        with socket.socket() as peer:
            peer.settimeout(0.2)
            return peer.connect_ex(("127.0.0.1", self.port)) != 0


@pytest.fixture
def listening() -> Iterator[Listening]:
    found = Listening()
    yield found
    found.door.close()
    found.context.destroy(linger=0)


def test_it_shuts_for_strangers_and_opens_when_they_go(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "STRANGERS", 3)
    crowd = [listening.connected() for _ in range(3)]
    listening.look_until(shut=True)
    assert listening.door.pause_ms is not None
    assert listening.is_held_back()
    crowd.pop().close()
    listening.look_until(shut=False)
    assert listening.door.pause_ms is None
    crowd.append(listening.connected())
    for peer in crowd:
        peer.close()


def test_a_connection_that_outlives_the_handshake_is_no_stranger(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "STRANGERS", 2)
    crowd = [listening.connected() for _ in range(2)]
    listening.look_until(shut=True)
    listening.now_s += door._KNOWN_AFTER_S + 1
    listening.door.look()
    assert not listening.door.shut
    for peer in crowd:
        peer.close()


def test_in_a_crowd_strangers_are_put_out_early(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "STRANGERS", 3)
    first, second = listening.connected(), listening.connected()
    while len(listening.door._strangers) < 2:
        assert listening.door.monitor.poll(WAIT_S * 1000)
        listening.door.look()
    listening.now_s += door.CROWDED_S + 1
    listening.door.look()
    assert not listening.door.shut, "two are no crowd"
    third = listening.connected()
    while len(listening.door._strangers) != 1:
        assert listening.door.monitor.poll(WAIT_S * 1000)
        listening.door.look()
    assert not listening.door.shut
    while first.recv(1024) or second.recv(1024):
        pass  # the greeting, then the end
    third.settimeout(0.2)
    with pytest.raises(TimeoutError):
        while third.recv(1024):
            pass
    for peer in (first, second, third):
        peer.close()


def test_another_connection_with_the_same_number_is_not_put_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = [socket.create_connection(server.getsockname(), WAIT_S) for _ in range(2)]
        ours = [server.accept()[0] for _ in range(2)]
    stranger = door._Stranger(0.0, door._peer_of(ours[0].fileno()))
    stranger.put_out(ours[1].fileno())
    places[1].sendall(b"x")
    assert ours[1].recv(1) == b"x"
    stranger.put_out(ours[0].fileno())
    assert places[0].recv(1) == b""
    read, write = os.pipe()
    stranger.put_out(read)
    os.close(read)
    stranger.put_out(read)
    os.close(write)
    for each in (*places, *ours):
        each.close()


def test_a_connection_that_sends_messages_is_no_stranger(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "STRANGERS", 1)
    client = listening.context.socket(zmq.DEALER)
    client.connect(f"tcp://127.0.0.1:{listening.port}")
    listening.look_until(shut=True)
    client.send(b"hello")
    listening.door.known(listening.router.recv_multipart(copy=False)[0])
    listening.door.look()
    assert not listening.door.shut


def test_it_shuts_while_few_descriptors_are_left(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowest = os.dup(0)
    os.close(lowest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = (lowest + 4) / door._SHARE
    monkeypatch.setattr(resource, "getrlimit", lambda which: (few, limits[1]))
    crowd = [listening.connected() for _ in range(4)]
    listening.look_until(shut=True)
    for peer in crowd:
        peer.close()
    while listening.door.shut:
        listening.door.monitor.poll(10)
        listening.door.look()
