"""Queues to peers: in order, bounded, with useful retries, and independent of each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from holdfast.ckpt.errors import CorruptError, FencedError, MismatchError, NotFoundError, PeerError
from holdfast.ckpt.memory.records import SidecarPeer
from holdfast.ckpt.sidecar.core import links
from holdfast.ckpt.sidecar.core.links import PeerQueue
from holdfast.ckpt.transport import Client, RunKey

KEY = RunKey.new()


def _wait(event: threading.Event) -> None:
    event.wait(5)


@pytest.fixture
def open_link() -> Iterator[Callable[..., PeerQueue]]:
    made: list[PeerQueue] = []

    def make(lanes: int = 1) -> PeerQueue:
        peer = SidecarPeer(node="b", address="tcp://127.0.0.1:1")
        made.append(PeerQueue(peer, KEY, purpose="test", lanes=lanes))
        return made[-1]

    yield make
    for link in made:
        link.close()


def test_jobs_are_done_in_order(open_link: Callable[..., PeerQueue]) -> None:
    link, done, end = open_link(), list[int](), threading.Event()
    for number in range(50):
        link.put(lambda _client, n=number: done.append(n))
    link.put(lambda _client: end.set())
    assert end.wait(5)
    assert done == list(range(50))


@pytest.mark.parametrize("code", ["", NotFoundError.code, CorruptError.code])
def test_what_passes_is_repeated(open_link: Callable[..., PeerQueue], code: str) -> None:
    link, tries, end = open_link(), list[int](), threading.Event()

    def fail_twice(_client: Client) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise PeerError("not yet", peer_code=code)
        end.set()

    link.put(fail_twice)
    assert end.wait(5)
    assert len(tries) == 3


@pytest.mark.parametrize(
    "error",
    [PeerError("no", peer_code=MismatchError.code), FencedError("over")],
    ids=["refused", "fenced"],
)
def test_what_does_not_pass_is_done_with(
    open_link: Callable[..., PeerQueue], error: Exception
) -> None:
    link, tries, end = open_link(), list[int](), threading.Event()

    def refuse(_client: Client) -> None:
        tries.append(1)
        raise error

    link.put(refuse)
    link.put(lambda _client: end.set())
    assert end.wait(5)
    assert len(tries) == 1


def test_what_is_superseded_is_not_sent(open_link: Callable[..., PeerQueue]) -> None:
    link, gate, end = open_link(), threading.Event(), threading.Event()
    wanted, sent = [True], list[str]()
    link.put(lambda _client: _wait(gate))
    link.put(lambda _client: sent.append("old"), is_wanted=lambda: wanted[0])
    link.put(lambda _client: end.set())
    wanted[0] = False
    gate.set()
    assert end.wait(5)
    assert sent == []


def test_a_job_that_is_superseded_while_it_is_repeated_ends(
    open_link: Callable[..., PeerQueue],
) -> None:
    link, end, wanted = open_link(), threading.Event(), [True]

    def never(_client: Client) -> None:
        raise PeerError("nobody there")

    link.put(never, is_wanted=lambda: wanted[0])
    link.put(lambda _client: end.set())
    assert not end.wait(0.1)
    status = link.status()
    assert status["queued"] == 2 and status["error"] == "nobody there"
    assert isinstance(status["oldest_s"], float) and status["oldest_s"] >= 0.1
    wanted[0] = False
    assert end.wait(5)


def test_the_queue_is_bounded(
    open_link: Callable[..., PeerQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_JOBS", 10)
    link, gate, end, done = open_link(), threading.Event(), threading.Event(), list[int]()
    started = threading.Event()

    def hold(_client: Client) -> None:
        started.set()
        gate.wait(5)

    link.put(hold)
    assert started.wait(5)
    for number in range(30):
        link.put(lambda _client, n=number: done.append(n), is_wanted=lambda n=number: n != 25)
    assert link.queued <= 11
    link.put(lambda _client: end.set())
    gate.set()
    assert end.wait(5)
    assert done[-4:] == [26, 27, 28, 29] and 25 not in done
    assert link.status()["dropped"]


def test_lanes_work_side_by_side(open_link: Callable[..., PeerQueue]) -> None:
    link, meet = open_link(lanes=2), threading.Barrier(2, timeout=5)
    met = [threading.Event(), threading.Event()]

    def meet_up(arrived: threading.Event) -> None:
        meet.wait()
        arrived.set()

    for each in met:
        link.put(lambda _client, e=each: meet_up(e))
    assert all(each.wait(5) for each in met)


def test_a_closed_link_drops_what_is_queued(open_link: Callable[..., PeerQueue]) -> None:
    link, started, sent = open_link(), threading.Event(), list[int]()

    def hold(_client: Client) -> None:
        started.set()
        raise PeerError("nobody there")

    link.put(hold)
    link.put(lambda _client: sent.append(1))
    assert started.wait(5)
    link.close()
    deadline_s = time.monotonic() + 5
    while link.queued and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert (link.queued, sent) == (0, [])


def test_a_job_that_fails_by_itself_does_not_end_the_queue(
    open_link: Callable[..., PeerQueue],
) -> None:
    link, end = open_link(), threading.Event()

    def fail(_client: Client) -> None:
        raise ValueError("buffer size must be a multiple of element size")

    link.put(fail)
    link.put(lambda _client: end.set())
    assert end.wait(5)
    assert link.queued <= 1
