"""Answers to probes of reachability: only a running server of the same run answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.ckpt.transport import Request, RunKey, Server, answers
from holdfast.elastic.agent.reach import AT_ONCE, ask_all
from holdfast.elastic.decisions.probing import ProbedNode

SOON_S = 0.2


@pytest.fixture
def key() -> RunKey:
    return RunKey.new()


@pytest.fixture
def server(key: RunKey) -> Iterator[Server]:
    found = Server(Request.reply, key=key)
    yield found
    found.close()


@pytest.fixture
def mute() -> Iterator[str]:
    """Give the address of a kernel that accepts connections for a process that does nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


def test_only_a_process_of_this_run_answers(server: Server, key: RunKey, mute: str) -> None:
    assert answers(server.address, key, timeout_s=30.0)
    assert not answers(server.address, RunKey.new(), timeout_s=SOON_S)
    assert not answers(mute, key, timeout_s=SOON_S)
    assert not answers("no address", key, timeout_s=SOON_S)


def test_nobody_answers_where_nobody_serves(key: RunKey) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    began_s = time.monotonic()
    assert not answers(f"tcp://127.0.0.1:{port}", key, timeout_s=60.0)
    assert time.monotonic() - began_s < 30.0, "a refusal is an answer of the kernel's"


def test_the_handler_is_not_asked(key: RunKey) -> None:
    call = threading.Event()
    server = Server(lambda request: call.set(), key=key)
    try:
        assert answers(server.address, key, timeout_s=30.0)
    finally:
        server.close()
    assert not call.is_set()


def test_all_are_asked_though_many_are_silent(
    server: Server, key: RunKey, mute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.elastic.agent.reach.TRIES_S", (SOON_S, 30.0))
    nodes = {"there": ProbedNode(address=server.address, mark="there#1/1")}
    found = ask_all(nodes, key, over=threading.Event())
    assert found == {"there"}
    monkeypatch.setattr("holdfast.elastic.agent.reach.TRIES_S", (SOON_S, SOON_S))
    silent = {f"n{i}": ProbedNode(address=mute, mark="#") for i in range(AT_ONCE // 8)}
    assert ask_all(silent, key, over=threading.Event()) == frozenset()
    over = threading.Event()
    over.set()
    assert ask_all(nodes, key, over=over) == frozenset()
