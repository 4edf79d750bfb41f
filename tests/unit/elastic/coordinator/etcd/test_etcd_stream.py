"""A stream of changes is alive or known to be broken; it is ordered and bounded."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.elastic.coordinator.etcd import reading
from holdfast.elastic.coordinator.etcd import stream as etcd_stream
from holdfast.elastic.coordinator.etcd.failures import Meaning
from holdfast.elastic.coordinator.etcd.stream import (
    CompactedError,
    StreamBrokenError,
    WatchStream,
    prefix_end,
)
from holdfast.elastic.coordinator.etcd.stubs import grpc, rpc

LATER_S = 30.0


class Member:
    """Plays the member's side of one watch; `say` sends a message, `hears` are the requests."""

    def __init__(self) -> None:
        self.hears: queue.Queue[Any] = queue.Queue()
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self.taken = 0

    def watch(self, metadata: Any) -> Any:
        return self

    async def write(self, request: Any) -> None:
        self.hears.put(request)

    async def read(self) -> Any:
        message = await self._messages.get()
        self.taken += message is not grpc.aio.EOF
        if isinstance(message, BaseException):
            raise message
        return message

    def cancel(self) -> None:
        """The stream gives the call up."""

    def send(self, message: Any) -> None:
        reading.soon(lambda: self._messages.put_nowait(message))

    def say(self, **fields: Any) -> None:
        header = rpc.ResponseHeader(revision=fields.pop("revision", 1))
        self.send(rpc.WatchResponse(header=header, **fields))

    def change(self, *revisions: int) -> None:
        events = [
            rpc.Event(kv=rpc.KeyValue(key=b"r/a", value=b"%d" % r, mod_revision=r))
            for r in revisions
        ]
        self.say(events=events)

    def end(self) -> None:
        self.send(grpc.aio.EOF)


@pytest.fixture
def member() -> Member:
    return Member()


@pytest.fixture
def stream(member: Member) -> Iterator[WatchStream]:
    line: Any = member
    stream = WatchStream(line, (), prefix=b"r/", after=4, patience_s=0.2)
    yield stream
    stream.close()


def _soon(seconds: float = LATER_S) -> float:
    return time.monotonic() + seconds


def test_it_asks_for_what_is_newer(member: Member, stream: WatchStream) -> None:
    create = member.hears.get(timeout=LATER_S).create_request
    assert (create.key, create.range_end, create.start_revision) == (b"r/", b"r0", 5)
    member.say(created=True, revision=7)
    assert stream.await_start(_soon()) == 7


def test_a_watch_that_is_not_taken_in_time_is_broken(stream: WatchStream) -> None:
    with pytest.raises(StreamBrokenError, match="in time"):
        stream.await_start(_soon(0.05))


def test_changes_come_once_and_in_order(member: Member, stream: WatchStream) -> None:
    member.change(4, 5, 6)  # 4 was delivered before
    member.say(revision=9)  # says nothing of what is delivered
    member.change(8)
    got: list[int] = []
    while len(got) < 3:
        got += [event.kv.mod_revision for event in stream.take(_soon())]
        assert stream.after == got[-1]
    assert got == [5, 6, 8]
    assert stream.take(_soon(0.05)) == []
    assert stream.after == 8


def test_what_came_before_the_break_is_delivered_first(member: Member, stream: WatchStream) -> None:
    member.change(5)
    member.end()
    assert [event.kv.mod_revision for event in stream.take(_soon())] == [5]
    with pytest.raises(StreamBrokenError, match="ended a watch"):
        stream.take(_soon())


def test_silence_is_asked_about_and_not_borne(
    member: Member, stream: WatchStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_stream, "_ASK_AFTER_S", 0.05)
    member.say(created=True)
    stream.await_start(_soon())
    member.hears.get(timeout=LATER_S)
    with pytest.raises(StreamBrokenError, match=r"silent for 0\.2 s"):
        stream.take(_soon())
    assert member.hears.get(timeout=LATER_S).WhichOneof("request_union") == "progress_request"


def test_a_sign_of_life_is_enough(
    member: Member, stream: WatchStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_stream, "_ASK_AFTER_S", 0.05)
    stream._patience_s = LATER_S
    member.hears.get(timeout=LATER_S)
    taking = threading.Thread(target=stream.take, args=(_soon(),), daemon=True)
    taking.start()
    for _ in range(3):
        member.hears.get(timeout=LATER_S)
        member.say(revision=99)
    member.change(5)
    taking.join(LATER_S)
    assert not taking.is_alive() and stream.after == 5


def test_a_connection_that_is_closed_breaks_it(member: Member, stream: WatchStream) -> None:
    member.send(asyncio.CancelledError())
    with pytest.raises(StreamBrokenError, match="closed") as caught:
        stream.take(_soon())
    assert caught.value.failure.member_fails


def test_one_thread_reads_all_watches(member: Member, stream: WatchStream) -> None:
    lines: list[Any] = [Member() for _ in range(20)]
    before = threading.active_count()
    streams = [WatchStream(line, (), prefix=b"r/", after=4, patience_s=LATER_S) for line in lines]
    for number, line in enumerate(lines):
        line.change(5 + number)
    assert [each.take(_soon())[0].kv.mod_revision for each in streams] == [*range(5, 25)]
    assert threading.active_count() == before
    for each in streams:
        each.close()


def test_a_compacted_watch_says_so(member: Member, stream: WatchStream) -> None:
    member.say(compact_revision=50, canceled=True)
    with pytest.raises(CompactedError):
        stream.take(_soon())


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("etcdserver: no leader", Meaning.NOT_DONE),
        ("rpc error: code = PermissionDenied desc = etcdserver: permission denied", Meaning.TOKEN),
        ("etcdserver: invalid auth token", Meaning.TOKEN),
        ("etcdserver: something else", Meaning.REFUSED),
    ],
)
def test_a_refused_watch_says_why(
    member: Member, stream: WatchStream, reason: str, meaning: Meaning
) -> None:
    member.say(created=True, canceled=True, cancel_reason=reason)
    with pytest.raises(StreamBrokenError) as caught:
        stream.await_start(_soon())
    assert caught.value.failure.meaning is meaning


def test_reading_ahead_is_bounded(member: Member, stream: WatchStream) -> None:
    most = etcd_stream._MOST_WAITING
    for revision in range(5, 5 + 2 * most):
        member.change(revision)
    deadline_s = _soon()
    while len(stream._waiting) < most:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert member.taken == most
    got: list[int] = []
    while len(got) < 2 * most:
        got += [event.kv.mod_revision for event in stream.take(_soon())]
    assert got == list(range(5, 5 + 2 * most))


def test_all_that_has_come_is_taken_at_once(member: Member, stream: WatchStream) -> None:
    for revision in (5, 6, 7):
        member.change(revision)
    member.say(compact_revision=50, canceled=True)
    deadline_s = _soon()
    while len(stream._waiting) < 4:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert [event.kv.mod_revision for event in stream.take(_soon())] == [5, 6, 7]
    with pytest.raises(CompactedError):
        stream.take(_soon())


@pytest.mark.parametrize(
    ("prefix", "end"),
    [(b"a", b"b"), (b"a/", b"a0"), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0")],
)
def test_the_end_of_a_prefix(prefix: bytes, end: bytes) -> None:
    assert prefix_end(prefix) == end
