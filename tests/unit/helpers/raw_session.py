"""A bulk session driven by hand: genuine messages, sent unchanged, damaged, or twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from holdfast.ckpt.transport import Client, RunKey, Server
from holdfast.ckpt.transport.envelope import (
    ENVELOPE_BYTES,
    MessageHeader,
    MessageKind,
    decode_envelope,
    parse_sealed,
)
from holdfast.ckpt.transport.sealing import Sealer
from holdfast.ckpt.transport.sessions import Ask, SessionGrant

DEADLINE_S = 10.0


def ask_session(server: Server, key: RunKey, *, instead: bytes = b"") -> SessionGrant:
    """Get a session as a client does."""
    client = Client(server.address, key)
    try:
        return client._ask_session(Ask(instead=instead), time.monotonic() + DEADLINE_S)
    finally:
        client.close()


class RawSession:
    """One session and a socket that sends whatever it is given."""

    def __init__(self, server: Server, key: RunKey) -> None:
        self.grant = ask_session(server, key)
        self.sealer = Sealer(self.grant.session, self.grant.key)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.plain_username = self.grant.session.hex().encode()
        self.socket.plain_password = self.grant.token.encode()
        self.socket.connect(f"tcp://127.0.0.1:{self.grant.port}")
        self.counter = 0

    def message(self, op: str, frames: Sequence[bytes] = (), *, body: Any = None) -> list[bytes]:
        """Return the next genuine message of the session."""
        self.counter += 1
        header = MessageHeader(id=self.counter, op=op, body=body)
        parts = self.sealer.seal(MessageKind.REQUEST, self.counter, header, frames, take=_memory)
        return [bytes(part) for part in parts]

    def send(self, parts: Sequence[bytes]) -> None:
        self.socket.send_multipart(list(parts))

    def receive(self) -> MessageHeader:
        """Return the header of the next answer; its seals are checked."""
        assert self.socket.poll(DEADLINE_S * 1000), "no answer"
        parts = self.socket.recv_multipart()
        envelope = parse_sealed(parts)
        assert envelope.kind is MessageKind.REPLY
        header = self.sealer.open_header(envelope, parts)
        self.sealer.open_frames(envelope, parts, header, take=_memory)
        return header

    def receive_hint(self) -> MessageKind:
        """Return the kind of the next message, which has an envelope and nothing else."""
        assert self.socket.poll(DEADLINE_S * 1000), "no answer"
        (part,) = self.socket.recv_multipart()
        assert len(part) == ENVELOPE_BYTES
        return decode_envelope(part).kind

    def is_silent(self, *, wait_s: float = 0.0) -> bool:
        return not self.socket.poll(wait_s * 1000)

    def close(self) -> None:
        self.context.destroy(linger=0)


def wait_until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.002)


def flipped(part: bytes, bit: int) -> bytes:
    """Return bytes with one bit changed."""
    changed = bytearray(part)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _memory(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))
