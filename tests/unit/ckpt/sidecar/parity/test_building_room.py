"""The resources of rows: reused memory, and no delay for others."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.blocks import random_payload
from rows import MIB, check_rows, send_over_the_wire, write
from sidecar_group import SidecarGroup, sidecar_group, wait_until

from holdfast.ckpt.parity import row_file
from holdfast.ckpt.parity.budget import FULL_IN_FLIGHT, memory_need
from holdfast.ckpt.testing.shards import INDEX_ROOM_BYTES


@pytest.fixture
def three(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c", threads=True) as group:
        yield group


def test_without_room_a_step_is_committed_and_protected_when_there_is_some(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = three.adopt()

    def full(_fd: int, _nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(row_file, "make_numbered", full)
        payloads = {rank: random_payload(100_000, seed=(rank,)) for rank in range(3)}
        write(three, world, 1, payloads)

        def is_said() -> bool:
            return all(client.status()["unprotected"] for client in three.clients.values())

        wait_until(is_said, "all say why the step is not protected")
        status = three.clients["a"].status()
        assert (status["committed"], status["protected"]) == (1, -1)
        assert "no room for a parity row" in status["unprotected"]["1/1"]
    three.await_protected(world, 1)
    assert three.clients["a"].status()["unprotected"] == {}
    check_rows(three, world, 1)


def test_rows_reuse_their_memory(three: SidecarGroup) -> None:
    world = three.adopt(keep=1)
    payloads = {rank: random_payload(300_000, seed=(rank,)) for rank in range(3)}
    paths = set()
    for step in range(1, 12):
        write(three, world, step, payloads)
        three.await_protected(world, step)
        paths |= {path.name for path in three.sidecars["a"].core.arena.directory.glob("*.row")}
    assert len(paths) <= 3
    status = three.clients["a"].status()
    assert status["bytes"]["parity"] <= 3 * 320_000
    assert {"seal", "exchange", "protect"} <= set(status["meters"])


def test_files_of_later_rows_are_made_ahead(three: SidecarGroup) -> None:
    world = three.adopt(keep=2)
    payloads = {rank: random_payload(MIB, seed=(rank,)) for rank in range(3)}
    write(three, world, 1, payloads)
    three.await_protected(world, 1)
    directory = three.sidecars["a"].core.arena.directory

    def rows() -> set[str]:
        return {path.name for path in directory.glob("*.row")}

    wait_until(lambda: len(rows()) == 3, "there is a file for each kept step and for one more")
    before = rows()
    for step in range(2, 7):
        write(three, world, step, payloads)
        three.await_protected(world, step)
    assert rows() == before
    check_rows(three, world, 6)


def test_rows_being_built_side_by_side_are_in_the_declared_need(three: SidecarGroup) -> None:
    send_over_the_wire(three)
    world = three.adopt(keep=1)

    def write_new(step: int) -> None:
        write(three, world, step, {r: random_payload(MIB, seed=(step, r)) for r in range(3)})

    write_new(1)
    three.await_protected(world, 1)
    gate, answer = threading.Event(), three.sidecars["b"].core.submit

    def later(request: Any, work: Callable[[], None], **options: Any) -> None:
        if request is not None and request.op == "column_bytes":
            threading.Thread(target=lambda: (gate.wait(10), answer(request, work))).start()
            return
        answer(request, work, **options)

    three.sidecars["b"].core.submit = later  # type: ignore[method-assign]
    write_new(2)
    write_new(3)
    holder = three.sidecars["c"]
    try:
        wait_until(lambda: len(holder.parities._building) == 2, "rows of both are being built")
        taken = sum(path.stat().st_size for path in holder.core.arena.directory.glob("*.row"))
        counted = holder.parities.nbytes()
    finally:
        gate.set()
    lengths = dict.fromkeys(range(3), MIB + INDEX_ROOM_BYTES)
    need = memory_need(world, lengths, node="c", slots_per_rank=world.keep + FULL_IN_FLIGHT)
    assert counted == taken <= need.parity
    three.await_protected(world, 3)


def test_a_slow_peer_holds_up_nobody_elses_fragments(three: SidecarGroup) -> None:
    send_over_the_wire(three)
    world = three.adopt(rank_nodes=("a", "b"))
    gate, answer = threading.Event(), three.sidecars["b"].core.submit

    def slowly(request: Any, work: Callable[[], None], **options: Any) -> None:
        if request is not None and request.op in ("column", "column_bytes"):
            threading.Thread(target=lambda: (gate.wait(10), answer(request, work))).start()
            return
        answer(request, work, **options)

    three.sidecars["b"].core.submit = slowly  # type: ignore[method-assign]
    payloads = {rank: random_payload(100_000, seed=(rank,)) for rank in range(2)}
    write(three, world, 1, payloads)
    links = three.sidecars["c"].exchange._links
    wait_until(lambda: ("b", "fragments") in links, "the step is committed on c")
    wait_until(lambda: links["a", "fragments"].queued == 0, "what a has to give is had")
    status = three.clients["c"].status()["peers"]["b/fragments"]
    assert status["queued"] == 1 and status["oldest_s"] >= 0
    gate.set()
    three.await_protected(world, 1)
    check_rows(three, world, 1)


def test_the_memory_of_a_lost_node_is_let_go(three: SidecarGroup) -> None:
    world = three.adopt()
    write(three, world, 1, {rank: random_payload(MIB, seed=(rank,)) for rank in range(3)})
    three.await_protected(world, 1)
    maps = three.sidecars["a"].exchange.builder.maps
    assert len(maps._slots) >= 2
    for lost in ("b", "c"):
        three.kill(lost, wipe=True)
    alone = three.adopt(generation=2, parity=0, rank_nodes=("a",))
    write(three, alone, 2, {0: random_payload(MIB, seed=(2,))})
    three.await_protected(alone, 2)
    assert [path for path in maps._slots if not Path(path).exists()] == []
