"""For arbitrary bytes the decoder raises its one error, and a live server keeps serving."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_session import RawSession, flipped, wait_until

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import Client, Request, RunKey, Server
from holdfast.ckpt.transport.envelope import (
    ENVELOPE_BYTES,
    PIECE_BYTES,
    TAG_BYTES,
    Envelope,
    EnvelopeError,
    MessageHeader,
    MessageKind,
    check_lengths,
    cut,
    decode_envelope,
    decode_header,
    encode_header,
    parse_sealed,
)
from holdfast.ckpt.transport.sealing import Sealer

_JSON_WORST = 64
"""Python objects are so much larger than their JSON at most: ``[{},{},…``."""

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
headers = st.builds(
    MessageHeader,
    id=st.integers(0, 2**62),
    op=st.text(),
    body=json_values,
    error=st.none() | st.text(),
    lengths=st.lists(st.integers(0, 2**40)).map(tuple),
)
envelopes = st.builds(
    Envelope,
    kind=st.sampled_from(MessageKind),
    session=st.binary(min_size=16, max_size=16),
    counter=st.integers(0, 2**64 - 1),
    pieces=st.integers(0, 1000),
)
nearly_headers = st.tuples(headers.map(encode_header), st.integers(0), st.binary(max_size=4)).map(
    lambda made: made[0][: made[1] % (len(made[0]) + 1)] + made[2]
)
hostile = st.sampled_from(
    [
        b'{"id":1,"body":' + b"[" * 5000,
        b'{"id":1,"body":' + b"{" * 5000,
        b'{"id":1,"body":"\xff\xfe"}',
        b'{"id":' + b"9" * 9000 + b"}",
        b'{"id":1e999}',
        b'{"id":-1,"lengths":[99999999999999999999999]}',
        b'{"id":1,"body":"\\ud800"}',
        b'{"id":1,"body":[' + b"{}," * 5000 + b"{}]}",
        b'{"id":1,"id":2,"op":"x","op":"y"}',
    ]
)


@settings(deadline=None)
@given(headers)
def test_a_header_comes_back_as_it_was(header: MessageHeader) -> None:
    assert decode_header(encode_header(header)) == header


@settings(deadline=None)
@given(envelopes)
def test_an_envelope_comes_back_as_it_was(envelope: Envelope) -> None:
    data = envelope.encode()
    assert len(data) == ENVELOPE_BYTES
    assert decode_envelope(data) == envelope


@settings(deadline=None)
@given(st.binary() | nearly_headers | hostile)
def test_no_bytes_make_the_header_decoder_raise_anything_else(data: bytes) -> None:
    tracemalloc.start()
    try:
        decode_header(data)
    except EnvelopeError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= _JSON_WORST * len(data) + (64 << 10)


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=80) | envelopes.map(Envelope.encode), max_size=6),
    st.integers(0, 200),
)
def test_no_parts_make_the_parser_raise_anything_else(parts: list[bytes], limit: int) -> None:
    try:
        envelope = parse_sealed(parts, limit_bytes=limit)
    except EnvelopeError:
        return
    assert len(parts) == 1 + (0 if envelope.kind is MessageKind.UNKNOWN else 1 + envelope.pieces)
    assert sum(map(len, parts[1:])) <= limit


@settings(deadline=None)
@given(st.lists(st.integers(0, 5 * PIECE_BYTES), max_size=8))
def test_lengths_fit_their_own_pieces_and_no_others(lengths: list[int]) -> None:
    sealed = [size + TAG_BYTES for size in cut(lengths)]
    assert sum(cut(lengths)) == sum(lengths)
    assert all(0 < size <= PIECE_BYTES for size in cut(lengths))
    check_lengths(lengths, sealed)
    with pytest.raises(EnvelopeError):
        check_lengths(lengths, [*sealed, TAG_BYTES + 1])
    with pytest.raises(EnvelopeError):
        check_lengths([*lengths, 1], sealed)


@settings(deadline=None)
@given(
    st.lists(st.integers(-(2**70), 2**70), max_size=2000),
    st.lists(st.integers(TAG_BYTES, 2**30), max_size=20),
)
def test_lengths_that_were_made_up_cost_nothing(lengths: list[int], sealed: list[int]) -> None:
    tracemalloc.start()
    try:
        check_lengths(lengths, sealed)
    except EnvelopeError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= 1 << 20


def _memory(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=300), max_size=4),
    st.integers(0),
    st.integers(0),
    st.sampled_from(["flip", "cut", "lengthen", "swap", "drop", "double"]),
)
def test_no_change_to_a_sealed_message_goes_unnoticed(
    frames: list[bytes], which: int, bit: int, way: str
) -> None:
    sealer = Sealer(b"s" * 16, b"k" * 16)
    message = sealer.seal(MessageKind.REQUEST, 7, MessageHeader(id=7, op="x"), frames, take=_memory)
    parts = [bytes(part) for part in message]
    damaged = _damage(parts, which % len(parts), bit, way)
    if damaged == parts:
        return
    with pytest.raises(EnvelopeError):
        envelope = parse_sealed(damaged)
        header = sealer.open_header(envelope, damaged)
        sealer.open_frames(envelope, damaged, header, take=_memory)
        raise AssertionError("a changed message was taken for genuine")


def _damage(parts: Sequence[bytes], at: int, bit: int, way: str) -> list[bytes]:
    damaged = list(parts)
    part = parts[at]
    match way:
        case "flip":
            damaged[at] = flipped(part, bit % (8 * len(part)))
        case "cut":
            damaged[at] = part[: bit % len(part)]
        case "lengthen":
            damaged[at] = part + bytes(1 + bit % 40)
        case "swap":
            other = bit % len(parts)
            damaged[at], damaged[other] = parts[other], part
        case "drop":
            del damaged[at]
        case "double":
            damaged.insert(at, part)
    return damaged


# -- a live server -------------------------------------------------------------------------------


def _echo(request: Request) -> None:
    request.reply(request.body, request.frames)


@pytest.fixture(scope="module")
def key() -> RunKey:
    return RunKey.new()


@pytest.fixture
def server(key: RunKey) -> Iterator[Server]:
    server = Server(_echo, key=key)
    yield server
    server.close()


def test_a_live_server_counts_thousands_of_bad_messages_and_serves_the_good(
    server: Server, key: RunKey
) -> None:
    """Random, truncated, flipped, reordered and replayed ones, from one who holds a session."""
    chance = random.Random(1)
    raw, client = RawSession(server, key), Client(server.address, key)
    seen: list[list[bytes]] = []
    for _ in range(3):
        seen.append(raw.message("echo", [chance.randbytes(200), b"", chance.randbytes(30)]))
        raw.send(seen[-1])
        raw.receive()
    ways = ["flip", "cut", "lengthen", "swap", "drop", "double"]
    sent = 0
    for number in range(3000):
        choice = number % 4
        if choice == 0:
            bad = [chance.randbytes(chance.randrange(60)) for _ in range(chance.randrange(1, 6))]
        elif choice == 1:
            bad = list(chance.choice(seen))
        else:
            fresh = raw.message("echo", [chance.randbytes(50), chance.randbytes(60)])
            at = chance.randrange(len(fresh))
            bad = _damage(fresh, at, chance.randrange(1 << 30), chance.choice(ways))
            if bad == fresh:
                continue
        if bad:
            raw.send(bad)
            sent += 1
        if number % 100 == 0:
            assert client.call("echo", number, [bytes(1000)], bulk=True)[0] == number
            assert client.call("echo", number)[0] == number
        if number % 8 == 0:  # what the server queues for a peer is bounded
            _await_refusals(server, sent)
    _await_refusals(server, sent)
    assert set(server.refusals) >= {"malformed", "unknown_session", "replayed", "tampered"}
    raw.close()
    client.close()


def _await_refusals(server: Server, count: int) -> None:
    wait_until(lambda: server.refusals.total() == count, lambda: (server.refusals, count))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.binary(max_size=60) | nearly_headers | hostile, min_size=1, max_size=4).filter(
        lambda parts: not _is_header(parts[0])
    )
)
def test_no_control_message_ends_the_server(parts: list[bytes]) -> None:
    """Each is sent by one who holds the run's key: the handshake stops everybody else."""
    server, client = _LIVE.get()
    before = server.refusals.total()
    assert client._control.send(list(parts))
    assert client.call("echo", "still there")[0] == "still there"
    assert server.refusals.total() == before + 1


def _is_header(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=MessageHeader)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


class _Live:
    """One server for all examples of the test above."""

    def __init__(self) -> None:
        self.pair: tuple[Server, Client] | None = None

    def get(self) -> tuple[Server, Client]:
        if self.pair is None:
            key = RunKey.new()
            server = Server(_echo, key=key)
            self.pair = server, Client(server.address, key)
        return self.pair

    def close(self) -> None:
        if self.pair is not None:
            self.pair[1].close()
            self.pair[0].close()
            self.pair = None


_LIVE = _Live()


@pytest.fixture(scope="module", autouse=True)
def _end_live() -> Iterator[None]:
    yield
    _LIVE.close()


def test_a_refused_control_message_leaves_the_asker_its_deadline(
    server: Server, key: RunKey
) -> None:
    client = Client(server.address, key)
    with pytest.raises(PeerError, match="no session"):
        client.call("__session__", {"instead": 3})
    with pytest.raises(PeerError, match="no session"):
        client.call("__session__", ["not", "a", "struct"])
    assert client.call("echo", 1)[0] == 1
    client.close()
