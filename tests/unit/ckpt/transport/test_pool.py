"""Connections that threads share: as many as calls at once, and none after the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import ClientPool, Request, RunKey, Server

KEY = RunKey.new()
WAIT_S = 30.0


class Gate:
    """Answers each ``wait`` when it is opened, and everything else at once."""

    def __init__(self) -> None:
        self.opened, self.arrived = threading.Event(), threading.Semaphore(0)

    def __call__(self, request: Request) -> None:
        if request.op == "wait":
            self.arrived.release()
            threading.Thread(target=self._later, args=(request,), daemon=True).start()
        else:
            request.reply(request.op)

    def _later(self, request: Request) -> None:
        self.opened.wait(WAIT_S)
        request.reply(request.op)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def pool(gate: Gate) -> Iterator[ClientPool]:
    server = Server(gate, key=KEY, bind="tcp://127.0.0.1:*")
    made = ClientPool(server.address, KEY, timeout_s=WAIT_S)
    yield made
    made.close()
    server.close()


def answer_of(pool: ClientPool, op: str) -> object:
    with pool.lend() as client:
        return client.call(op)[0]


def test_a_call_that_waits_holds_up_no_other(pool: ClientPool, gate: Gate) -> None:
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(answer_of, pool, "wait") for _ in range(2)]
        assert all(gate.arrived.acquire(timeout=WAIT_S) for _ in waiting)
        assert answer_of(pool, "now") == "now"
        gate.opened.set()
        assert [each.result(WAIT_S) for each in waiting] == ["wait", "wait"]


def test_an_idle_connection_is_lent_again(pool: ClientPool) -> None:
    with pool.lend() as first:
        pass
    with pool.lend() as again, pool.lend() as other:
        assert again is first
        assert other is not first


def test_closing_ends_a_lent_connection_with_its_call(pool: ClientPool, gate: Gate) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(answer_of, pool, "wait")
        assert gate.arrived.acquire(timeout=WAIT_S)
        pool.close()
        gate.opened.set()
        assert waiting.result(WAIT_S) == "wait"
    with pytest.raises(PeerError, match="this client is closed"):
        answer_of(pool, "now")
