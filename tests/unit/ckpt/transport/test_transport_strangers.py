"""A connection without the run's key: the memory that it can take, and its time."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
import zmq

from holdfast.ckpt.transport import Client, RunKey, Server, bulk_server, server
from holdfast.ckpt.transport.envelope import CONTROL_BYTES, PART_BYTES
from holdfast.ckpt.transport.sockets import HANDSHAKE_MS

KEY = RunKey.new()
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_WAIT_S = 60.0


def greeting(mechanism: bytes) -> bytes:
    return _SIGNATURE + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bytes, int]]:
    """The ports of a server's two sockets, by mechanism; a handshake may take half a second."""
    for module in (server, bulk_server):
        monkeypatch.setattr(module, "HANDSHAKE_MS", 500)
    served = Server(lambda request: request.reply(request.body), key=KEY)
    client = Client(served.address, KEY)
    assert client.call("echo", 1, bulk=True)[0] == 1, "which opens the second socket"
    assert served._bulk is not None
    yield {b"CURVE": int(served.address.rpartition(":")[2]), b"PLAIN": served._bulk.port}
    assert client.call("echo", 2)[0] == 2
    assert client.call("echo", 3, bulk=True)[0] == 3
    client.close()
    served.close()


def greeted(port: int, mechanism: bytes) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), _WAIT_S)
    peer.sendall(greeting(mechanism))
    received = b""
    while len(received) < len(greeting(mechanism)):
        received += peer.recv(64)
    return peer


def ended(peer: socket.socket) -> bool:
    """Wait until the server closes the connection."""
    try:
        while peer.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    ("mechanism", "limit"), [(b"CURVE", CONTROL_BYTES), (b"PLAIN", PART_BYTES)]
)
def test_a_stranger_cannot_begin_a_large_message(
    ports: dict[bytes, int], mechanism: bytes, limit: int
) -> None:
    """The attack: each connection without a key made a server hold 31 MiB, or 128."""
    assert limit <= (1 << 20) + 16
    with greeted(ports[mechanism], mechanism) as peer:
        peer.sendall(b"\x02" + struct.pack(">Q", limit + 1))
        assert ended(peer)


@pytest.mark.parametrize("begins", [0, 5, len(greeting(b""))])
@pytest.mark.parametrize("mechanism", [b"CURVE", b"PLAIN"])
def test_a_connection_that_shows_no_key_is_closed(
    ports: dict[bytes, int], mechanism: bytes, begins: int
) -> None:
    with socket.create_connection(("127.0.0.1", ports[mechanism]), _WAIT_S) as peer:
        peer.sendall(greeting(mechanism)[:begins])
        assert ended(peer)


def test_a_half_sent_message_is_not_waited_for(ports: dict[bytes, int]) -> None:
    with greeted(ports[b"CURVE"], b"CURVE") as peer:
        peer.sendall(b"\x02" + struct.pack(">Q", CONTROL_BYTES - 1) + bytes(1000))
        assert ended(peer)


def test_no_socket_of_a_server_is_without_limits() -> None:
    assert zmq.zmq_version_info() >= (4, 3)
    served = Server(lambda request: request.reply(), key=KEY)
    assert served._router.getsockopt(zmq.MAXMSGSIZE) == CONTROL_BYTES
    assert served._router.getsockopt(zmq.HANDSHAKE_IVL) == HANDSHAKE_MS
    served.close()
