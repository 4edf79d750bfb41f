"""The parts of the transport by themselves: lent memory, sessions, keys and limits."""

from __future__ import annotations

import gc
import threading

import pytest

from holdfast.ckpt.errors import BusyError
from holdfast.ckpt.transport import TransportLimits
from holdfast.ckpt.transport.buffers import Buffers
from holdfast.ckpt.transport.envelope import (
    BULK_BYTES,
    EnvelopeError,
    MessageHeader,
    MessageKind,
    Reason,
    parse_sealed,
)
from holdfast.ckpt.transport.sealing import Sealer
from holdfast.ckpt.transport.sessions import Ask, SessionGrant, Sessions

_MIB = 1 << 20


def memory(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


# -- buffers -------------------------------------------------------------------------------------


def test_memory_comes_back_when_its_last_view_is_gone() -> None:
    buffers = Buffers(keep_bytes=4 * _MIB)
    view = buffers.take(_MIB)
    view[:3] = b"abc"
    part = view[1:2]
    del view
    assert buffers.lent_bytes == _MIB
    assert bytes(part) == b"b"
    del part
    assert (buffers.lent_bytes, buffers.kept_bytes) == (0, _MIB)
    assert bytes(buffers.take(_MIB)[:3]) == b"abc"  # the same, warm


def test_no_two_borrowers_share_memory() -> None:
    buffers = Buffers(keep_bytes=4 * _MIB)
    views = [buffers.take(1000) for _ in range(10)]
    for n, view in enumerate(views):
        view[:] = bytes([n]) * 1000
    assert [bytes(view) for view in views] == [bytes([n]) * 1000 for n in range(10)]


def test_no_more_is_kept_than_allowed() -> None:
    buffers = Buffers(keep_bytes=2 * _MIB)
    views = [buffers.take(_MIB) for _ in range(5)]
    del views
    assert (buffers.lent_bytes, buffers.kept_bytes) == (0, 2 * _MIB)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 65536, 65537, _MIB + 16, 8 * _MIB + 128])
def test_memory_has_the_length_asked_for_and_wastes_little(nbytes: int) -> None:
    buffers = Buffers(keep_bytes=0)
    view = buffers.take(nbytes)
    assert view.nbytes == nbytes
    assert buffers.lent_bytes <= nbytes * 5 // 4 + (64 << 10)


def test_one_owner_gets_a_quarter_and_all_together_the_limit() -> None:
    buffers = Buffers(keep_bytes=0, limit_bytes=8 * _MIB)
    buffers.check(2 * _MIB, owner=b"a")
    blocks = [buffers.take(_MIB, owner=b"a") for _ in range(2)]
    with pytest.raises(BusyError, match="2,097,152 of them by this client"):
        buffers.check(1, owner=b"a")
    blocks += [buffers.take(_MIB, owner=owner) for owner in (b"b", b"c", b"d") for _ in range(2)]
    with pytest.raises(BusyError, match="8,388,608 bytes are unanswered"):
        buffers.check(1, owner=b"e")
    blocks.pop()
    buffers.check(_MIB, owner=b"e")


def test_memory_that_dies_inside_a_critical_section_does_not_lock_up() -> None:
    buffers = Buffers(keep_bytes=_MIB)
    cycle: list[object] = [buffers.take(1000)]
    cycle.append(cycle)
    del cycle
    with buffers._lock:
        gc.collect()  # the collector may run anywhere
    assert buffers.lent_bytes == 0


def test_many_threads_may_borrow() -> None:
    buffers = Buffers(keep_bytes=_MIB)
    wrong: list[int] = []

    def borrow(mark: int) -> None:
        for _ in range(300):
            view = buffers.take(4096)
            view[:] = bytes([mark]) * 4096
            if bytes(view) != bytes([mark]) * 4096:
                wrong.append(mark)

    threads = [threading.Thread(target=borrow, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert buffers.lent_bytes == 0


# -- sessions ------------------------------------------------------------------------------------


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def open_session(sessions: Sessions, *, instead: bytes = b"") -> SessionGrant:
    return sessions.open(Ask(instead=instead), port=1)


def test_every_session_has_a_name_a_key_and_a_token_of_its_own() -> None:
    sessions = Sessions(TransportLimits())
    grants = [open_session(sessions) for _ in range(20)]
    for field in ("session", "key", "token"):
        assert len({getattr(grant, field) for grant in grants}) == 20


def test_the_longest_unused_session_gives_way() -> None:
    sessions = Sessions(TransportLimits(sessions=2))
    first, second = open_session(sessions), open_session(sessions)
    sessions.find(first.session)
    third = open_session(sessions)
    assert len(sessions) == 2
    sessions.find(first.session)
    sessions.find(third.session)
    with pytest.raises(EnvelopeError) as refused:
        sessions.find(second.session)
    assert refused.value.reason is Reason.UNKNOWN_SESSION


def test_a_session_expires_by_age_even_if_it_is_used() -> None:
    clock = Clock()
    sessions = Sessions(TransportLimits(session_s=10), clock=clock)
    grant = open_session(sessions)
    clock.now_s = 9
    sessions.take(grant.session, 1)
    clock.now_s = 10
    with pytest.raises(EnvelopeError, match="no such session"):
        sessions.take(grant.session, 2)
    open_session(sessions)
    assert len(sessions) == 1


def test_counters_only_grow() -> None:
    sessions = Sessions(TransportLimits())
    grant = open_session(sessions)
    sessions.take(grant.session, 5)
    for counter in (5, 4, 0):
        with pytest.raises(EnvelopeError) as refused:
            sessions.take(grant.session, counter)
        assert refused.value.reason is Reason.REPLAYED
    sessions.take(grant.session, 6)
    assert open_session(sessions, instead=grant.session).seen == 6
    assert open_session(sessions, instead=grant.session).seen == -1


def test_a_connection_needs_the_name_and_the_token() -> None:
    sessions = Sessions(TransportLimits())
    one, other = open_session(sessions), open_session(sessions)
    name = one.session.hex().encode()
    assert sessions.admits(name, one.token.encode())
    assert not sessions.admits(name, other.token.encode())
    assert not sessions.admits(name, b"")
    assert not sessions.admits(b"", one.token.encode())
    assert not sessions.admits(b"\xff\x00", b"\xff")


@pytest.mark.parametrize(
    "wrong",
    [
        {"message_bytes": 0},
        {"message_bytes": BULK_BYTES + 1},
        {"unanswered_bytes": BULK_BYTES},
        {"sessions": 0},
    ],
)
def test_limits_that_contradict_each_other_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TransportLimits(**wrong)


# -- seals ---------------------------------------------------------------------------------------


def test_no_two_parts_of_a_session_share_a_nonce() -> None:
    """Also none of a request and its answer: they have the same counter and key."""
    sealer, seen = Sealer(bytes(16), bytes(16)), set()
    for kind in MessageKind:
        for counter in (1, 2, 255, 256, 1 << 62):
            parts = sealer.seal(kind, counter, MessageHeader(id=1), [b"ab"] * 300, take=memory)
            envelope = parse_sealed(parts) if kind is not MessageKind.UNKNOWN else None
            if envelope is not None:
                seen |= {envelope.nonce(part) for part in range(envelope.pieces + 1)}
    assert len(seen) == 2 * 5 * 301
    assert {len(nonce) for nonce in seen} == {12}


def test_nothing_of_header_or_frames_travels_in_clear() -> None:
    sealer = Sealer(bytes(16), bytes(range(16)))
    frames = [b"secret frame" * 20]
    header = MessageHeader(id=1, op="secret op", body="secret body")
    parts = sealer.seal(MessageKind.REQUEST, 1, header, frames, take=memory)
    assert b"secret" not in b"".join(bytes(part) for part in parts)


def test_a_seal_that_finds_no_memory_leaves_nothing_half_sealed() -> None:
    requests: list[int] = []

    def take(nbytes: int) -> memoryview:
        requests.append(nbytes)
        raise BusyError("full")

    sealer = Sealer(bytes(16), bytes(16))
    with pytest.raises(BusyError):
        sealer.seal(MessageKind.REPLY, 1, MessageHeader(id=1), [bytes(_MIB)], take=take)
    assert requests == [_MIB + 16]
