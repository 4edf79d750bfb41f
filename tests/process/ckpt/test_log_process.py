"""Logs in sidecar processes that are killed, stopped and replaced, one after another."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from sidecar_group import DEADLINE_S, SidecarGroup, sidecar_group, wait_until

from holdfast.ckpt.errors import CkptError, NotFoundError
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.sidecar.logs.copies import CALL_TIMEOUT_S
from holdfast.ckpt.sidecar.logs.places import holders_of


@pytest.fixture
def four(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c", "d") as group:
        yield group


def record(number: int) -> bytes:
    return b"%d:" % number * (1 + number % 40)


def append(client: SidecarClient, *, first: int, count: int) -> int:
    end = client.log_append("tokens", [record(first + i) for i in range(count)])
    assert end == first + count
    return end


def protect(client: SidecarClient, end: int) -> None:
    assert client.log_protected("tokens", at_least=end, timeout_s=DEADLINE_S) == end


def settled(group: SidecarGroup) -> bool:
    return all(c.status()["log_copies_unsettled"] == 0 for c in group.clients.values())


def test_a_sidecar_killed_while_it_appends_loses_nothing_it_acknowledged(
    four: SidecarGroup,
) -> None:
    four.adopt(parity=1)
    acknowledged = 0

    def write(client: SidecarClient) -> None:
        nonlocal acknowledged
        try:
            for number in count(acknowledged, 5):
                acknowledged = append(client, first=number, count=5)
        except CkptError:
            return

    for generation in range(2, 5):
        client = four.clients["a"]
        end = client.log_open("tokens")
        assert end >= acknowledged
        acknowledged = end
        writer = threading.Thread(target=write, args=(client,))
        writer.start()
        wait_until(lambda: acknowledged > end + 200, "it writes")  # noqa: B023
        os.kill(four.processes["a"].pid, signal.SIGKILL)
        writer.join()
        four.kill("a", wipe=False)
        four.start("a")
        four.adopt(parity=1, generation=generation)
        found = four.clients["a"].log_read("tokens", node="a")
        assert len(found) >= acknowledged
        assert found == [record(number) for number in range(len(found))]
    protect(four.clients["a"], len(found))
    four.kill("a", wipe=True)
    assert four.clients["d"].log_read("tokens", node="a") == found


@pytest.mark.parametrize(
    "lost", ["ab", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("bc", "ac"))]
)
def test_writer_and_holders_may_go_as_long_as_the_parity_covers_them(
    four: SidecarGroup, lost: str
) -> None:
    four.adopt(parity=2)
    four.clients["a"].log_open("tokens")
    end = append(four.clients["a"], first=0, count=500)
    protect(four.clients["a"], end)
    for node in lost:
        four.kill(node, wipe=True)
    wanted = [record(number) for number in range(end)]
    assert four.clients["d"].log_read("tokens", node="a") == wanted
    four.adopt(parity=1, generation=2)
    if "a" in four.clients:
        protect(four.clients["a"], end)
    wait_until(lambda: settled(four), "copies are made anew")
    four.kill(next(node for node in "cab" if node in four.clients), wipe=True)
    assert four.clients["d"].log_read("tokens", node="a") == wanted


def test_a_log_outlives_losses_one_after_another_until_it_is_dropped(four: SidecarGroup) -> None:
    world = four.adopt(parity=1)
    four.clients["a"].log_open("tokens")
    end = append(four.clients["a"], first=0, count=100)
    protect(four.clients["a"], end)
    wanted = [record(number) for number in range(end)]
    for generation, node in enumerate(("a", holders_of(world, "a")[0].node), 2):
        four.kill(node, wipe=True)
        four.adopt(parity=1, generation=generation)
        wait_until(lambda: settled(four), "copies are made anew")
        for client in four.clients.values():
            assert client.log_read("tokens", node="a") == wanted
    first, *_ = four.clients.values()
    first.log_drop("tokens", node="a")
    clients = four.clients.values()
    wait_until(lambda: not any(c.status()["log_copies"] for c in clients), "dropped everywhere")
    assert all(client.status()["bytes"]["logs"] == 0 for client in clients)
    with pytest.raises(NotFoundError):
        first.log_read("tokens", node="a")


@pytest.mark.exhaustive
def test_a_stopped_holder_delays_neither_appends_nor_the_other_holder(four: SidecarGroup) -> None:
    four.adopt(parity=2)
    client = four.clients["a"]
    client.log_open("tokens")
    end = append(client, first=0, count=10)
    protect(client, end)

    def late() -> int:
        return int(client.status()["counters"].get("log_late", 0))

    before = late()
    os.kill(four.processes["b"].pid, signal.SIGSTOP)
    try:
        slowest_s = 0.0
        for _ in range(50):
            began_s = time.monotonic()
            end = append(client, first=end, count=10)
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        assert slowest_s < CALL_TIMEOUT_S, "none waited for the one that is stopped"
        other = four.clients["c"]
        wait_until(lambda: other.status()["bytes"]["logs"] > 0, "the other has a copy")
        assert client.status()["log_lag"]["tokens"]["records"] == 500
        wait_until(lambda: late() > before, "it is late")
    finally:
        os.kill(four.processes["b"].pid, signal.SIGCONT)
    protect(client, end)
    assert client.status()["log_lag"]["tokens"] == {"records": 0, "bytes": 0, "oldest_s": 0.0}
