"""False answers and requests about columns and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.blocks import random_payload, write_payload
from rows import MIB, WAYS, check_rows, flip, send_over_the_wire, write
from sidecar_group import SidecarGroup, sidecar_group, wait_until

from holdfast.ckpt.errors import CkptError, NotFoundError
from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.sidecar.core.messages import AskBytes, ReadRow
from holdfast.ckpt.transport import Client


@pytest.fixture
def three(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c", threads=True) as group:
        yield group


GARBAGE: dict[str, Callable[[dict[str, Any], bytes], tuple[Any, bytes]]] = {
    "no object": lambda _body, frame: ("nonsense", frame),
    "sums of odd length": lambda body, frame: (body, frame[:-1]),
    "sums missing": lambda body, _frame: (body, b""),
    "a span of another rank's column": lambda body, frame: (
        {**body, "spans": [{**each, "into": each["into"] + 4096} for each in body["spans"]]},
        frame,
    ),
    "a span before the block": lambda body, frame: (
        {**body, "spans": [{**each, "at": -4096} for each in body["spans"]]},
        frame,
    ),
    "changes outside the column": lambda body, frame: (
        {**body, "changed": [[0, 1 << 40]]},
        frame,
    ),
    "changes twice": lambda body, frame: ({**body, "changed": [[0, 100], [50, 200]]}, frame),
}


@WAYS
@pytest.mark.parametrize("how", GARBAGE)
def test_a_malformed_answer_is_said_and_asked_for_again(
    three: SidecarGroup, by_wire: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_wire:
        send_over_the_wire(three)
    call, garbled = Client.call, [0]

    def garbling(client: Client, op: str, *args: Any, **options: Any) -> Any:
        body, frames = call(client, op, *args, **options)
        if op == "column" and garbled[0] < 6:
            garbled[0] += 1
            body, frame = GARBAGE[how](body, bytes(frames[0]))
            return body, [memoryview(frame)]
        return body, frames

    world = three.adopt()
    payloads = {rank: random_payload(MIB, seed=(rank,)) for rank in range(3)}
    with monkeypatch.context() as patch:
        patch.setattr(Client, "call", garbling)
        write(three, world, 1, payloads)
        three.await_protected(world, 1)
    check_rows(three, world, 1)


@pytest.mark.parametrize("ranges", [((-1, 5),), ((5, 1),), ((0, 1 << 50),), ((0, 9), (3, 12))])
def test_bytes_outside_a_column_are_refused(
    three: SidecarGroup, ranges: tuple[tuple[int, int], ...]
) -> None:
    world = three.adopt()
    write(three, world, 1, {rank: random_payload(100_000, seed=(rank,)) for rank in range(3)})
    three.await_protected(world, 1)
    owner = three.clients["b"]
    body = AskBytes(generation=1, step=1, stripe=0, column=0, ranges=ranges)
    with pytest.raises(CkptError, match="ranges"):
        owner.call("column_bytes", body, bulk=True)
    slots = three.sidecars["b"].core.slots.all()
    assert not any(slot.pins for slot in slots)


@pytest.mark.parametrize(("at", "nbytes"), [(-8, 8), (0, -1), (8, -16), (1 << 60, 1)])
def test_bytes_outside_a_row_are_refused(three: SidecarGroup, at: int, nbytes: int) -> None:
    world = three.adopt()
    write(three, world, 1, {rank: random_payload(100_000, seed=(rank,)) for rank in range(3)})
    three.await_protected(world, 1)
    (row,) = three.sidecars["a"].parities.sealed()
    body = ReadRow(
        generation=1, step=1, stripe=row.place[0], row=row.place[1], at=at, nbytes=nbytes
    )
    with pytest.raises(NotFoundError):
        three.clients["a"].call("row", body, bulk=True)


def test_each_row_that_is_not_sealed_says_why(three: SidecarGroup) -> None:
    world = three.adopt(rank_nodes=("a", "b"), parity=2)
    builder = three.sidecars["c"].exchange.builder
    for rank, node in ((0, "a"), (1, "b")):
        payload = random_payload(MIB, seed=(rank,))
        if rank == 1:
            slot = three.sidecars["a"].core.slots.holding((1, 1, 0))
            assert slot is not None
            flip(slot.file.path, HEADER_BYTES + 1000)
        write_payload(three.clients[node], world, payload, step=1, rank=rank)
    wait_until(lambda: bool(builder.status()["unprotected"]), "the holder says why")
    wait_until(lambda: len(builder._builds) == 1, "the other row is sealed")
    assert "rank 0" in builder.status()["unprotected"]["1/1"]
