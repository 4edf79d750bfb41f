"""Payloads on their way: one upload, a few fetches, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import pytest
from doubles import seas

from holdfast.ckpt.errors import NotFoundError, StoreError
from holdfast.elastic.islands.haul.freight import Freight, Haul, carry_out, on_thread
from holdfast.elastic.islands.haul.line import PacedLines
from holdfast.elastic.sea.records import Part, Work
from holdfast.elastic.sea.settings import Islands

_T = TypeVar("_T")
VIEW = seas.entered(seas.founded(Islands(every=4, portions=2, overlap=1)), *"abcdefg")


class Held:
    """Transfers that go when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, transfer: Callable[[], _T], /) -> Future[_T]:
        future = Future[_T]()
        self.waiting.append(lambda: carry_out(transfer, future))
        return future

    def go(self) -> None:
        """Carry out what waits."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each()


class Files:
    """Payloads by digest; the next calls fail with ``errors``."""

    def __init__(self) -> None:
        self.payloads = {work(name).digest: name.encode() for name in "abcdefg"}
        self.errors: list[Exception] = []
        self.read: list[str] = []

    def publish(self, work: Work, payload: bytes) -> Work:
        """Keep a payload."""
        self._fail()
        self.payloads[work.digest] = payload
        return work

    def payload(self, island: str, digest: str) -> bytes:
        """Return a payload."""
        self._fail()
        self.read.append(island)
        try:
            return self.payloads[digest]
        except KeyError:
            raise NotFoundError(digest) from None

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


def work(name: str) -> Work:
    return seas.work(VIEW, name, nbytes=1)


def parts(names: str) -> list[Part]:
    return [work(name).part for name in names]


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def freight(files: Files, held: Held) -> Freight:
    return Freight(files, submit=held)


def test_a_work_is_published_once_and_told_when_it_is_there(freight: Freight, held: Held) -> None:
    woken = []
    freight.wake = lambda: woken.append(True)
    assert freight.publish(work("a"), b"a") is None
    assert freight.publish(work("a"), b"a") is None
    assert (freight.is_sending, len(held.waiting)) == (True, 1)
    held.go()
    found = freight.publish(work("a"), b"a")
    assert found is not None
    assert (found[0], freight.is_sending, woken) == (work("a"), False, [True])


def test_an_upload_that_failed_begins_anew(freight: Freight, files: Files, held: Held) -> None:
    files.errors = [StoreError("full")]
    freight.publish(work("a"), b"a")
    held.go()
    with pytest.raises(StoreError, match="full"):
        freight.publish(work("a"), b"a")
    assert freight.publish(work("a"), b"a") is None
    held.go()
    assert freight.publish(work("a"), b"a")


def test_a_merge_waits_for_its_payloads_and_own_ones_are_here(
    freight: Freight, files: Files, held: Held
) -> None:
    freight.put(work("a").digest, b"mine")
    freight.fetch((part, 1) for part in parts("bc"))
    assert freight.take(parts("abc")) is None
    assert len(held.waiting) == 2, "nothing is fetched twice"
    held.go()
    assert freight.take(parts("abc")) == [b"mine", b"b", b"c"]
    assert files.read == ["b", "c"]
    assert freight.haul(parts("abc")).fetched_bytes == 2
    freight.release(part.digest for part in parts("abc"))
    assert freight.haul(parts("abc")) == Haul()


def test_a_few_are_fetched_at_once_the_first_ones_first(freight: Freight, held: Held) -> None:
    freight.fetch((part, 1) for part in parts("abcdefg"))
    assert len(held.waiting) == 4
    held.go()
    freight.fetch((part, 1) for part in parts("abcdefg"))
    assert len(held.waiting) == 3
    held.go()
    assert freight.take(parts("gfedcba")) == [each.encode() for each in "gfedcba"]


def test_a_fetch_that_failed_is_told_once_and_begins_anew(
    freight: Freight, files: Files, held: Held
) -> None:
    files.errors = [StoreError("away"), StoreError("still away")]
    freight.fetch((part, 1) for part in parts("a"))
    held.go()
    with pytest.raises(StoreError, match="away"):
        freight.check(named=set())
    freight.check(named=set())
    assert freight.take(parts("a")) is None
    held.go()
    with pytest.raises(StoreError, match="still away"):
        freight.take(parts("a"))
    assert freight.take(parts("a")) is None
    held.go()
    assert freight.take(parts("a")) == [b"a"]


def test_a_payload_that_is_gone_is_told_only_where_a_merge_names_it(
    freight: Freight, files: Files, held: Held
) -> None:
    files.payloads.clear()
    for named in (set[str](), {work("a").digest}):
        freight.fetch((part, 1) for part in parts("a"))
        held.go()
        freight.check(named=named)
    with pytest.raises(NotFoundError):
        freight.take(parts("a"))


def test_what_nobody_needs_is_released_though_it_is_under_way(freight: Freight, held: Held) -> None:
    freight.fetch((part, 1) for part in parts("ab"))
    freight.keep({work("b").digest})
    held.go()
    assert freight.take(parts("b")) == [b"b"]
    assert freight.take(parts("a")) is None


def test_an_island_that_gives_its_payload_is_asked_before_the_store(files: Files) -> None:
    class Peers:
        def __init__(self) -> None:
            self.offered: list[bytes] = []

        def offer(self, digest: str, payload: bytes) -> None:
            self.offered.append(payload)

        def ask(self, part: Part, nbytes: int) -> bytes | None:
            assert nbytes == 1
            return b"!" if part.island == "a" else None

    peers = Peers()
    freight = Freight(files, peers=peers)
    assert freight.publish(work("c"), b"c")
    assert peers.offered == [b"c"]
    freight.fetch((part, 1) for part in parts("ab"))
    assert freight.take(parts("ab")) == [b"!", b"b"]
    assert files.read == ["b"]
    moved = freight.haul(parts("ab"))
    assert (moved.fetched_bytes, moved.direct_bytes) == (2, 1)


def test_transfers_end_when_nobody_needs_them(files: Files) -> None:
    lines = PacedLines.of(40_000, 0)

    class Slow(Files):
        def publish(self, work: Work, payload: bytes) -> Work:
            lines.up.pay(1 << 40)
            return work

    lines.down.close()
    freight = Freight(Slow(), lines=lines, submit=on_thread)
    assert freight.publish(work("a"), b"a") is None
    assert not freight.rest(0.0)
    freight.stop()
    assert freight.rest(60.0)
    with pytest.raises(StoreError, match="not needed any more"):
        freight.publish(work("a"), b"a")
    lines.down.pay(1)
