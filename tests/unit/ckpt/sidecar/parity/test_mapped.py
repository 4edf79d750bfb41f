"""Files of another sidecar on this host are read only while they hold the expected content."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from doubles.blocks import make_block, random_payload, write_payload
from rows import is_intact
from sidecar_group import SidecarGroup, sidecar_group

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.memory.arena import SlotFile, SlotHeader, run_digest
from holdfast.ckpt.memory.block import SlotState, block_bytes
from holdfast.ckpt.memory.hosts import FileRef, host_id
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.native.sums import SUM_BYTES, Sums, runs_of, sums_of
from holdfast.ckpt.sidecar.core.messages import Column, ColumnSpan
from holdfast.ckpt.sidecar.parity.mapped import MappedColumn

RUN = run_digest("test")


@pytest.fixture
def maps() -> Iterator[SlotMaps]:
    opened = SlotMaps()
    yield opened
    opened.close()


def sealed(path: Path) -> tuple[SlotFile, Column, Sums, bytes]:
    """Return a sealed slot, and what its owner says of a column that is all of it."""
    entry, block = make_block(random_payload(300_000, seed=(1,)))
    slot = SlotFile.create(path, len(block))
    slot.block(len(block))[:] = block
    slot.write_header(SlotHeader.of(entry, SlotState.SEALED), run=RUN)
    sums = sums_of(block)
    span = ColumnSpan(
        entry=entry,
        file=FileRef.of(path),
        at=0,
        nbytes=block_bytes(entry),
        into=0,
        first=0,
        count=len(sums),
    )
    return slot, Column(host=host_id(), spans=(span,)), sums, block


def test_a_column_is_read_where_it_lies(tmp_path: Path, maps: SlotMaps) -> None:
    _, column, sums, block = sealed(tmp_path / "1.slot")
    mapped = MappedColumn.open(column, sums, maps, node="b", run=RUN)
    assert mapped is not None
    ((at, part),) = mapped.reader().parts(1000, 200_000)
    assert (at, bytes(part)) == (1000, block[1000:200_000])
    assert mapped.is_current()


def test_the_runs_of_a_column_are_where_its_bytes_are(tmp_path: Path, maps: SlotMaps) -> None:
    _, column, sums, block = sealed(tmp_path / "1.slot")
    mapped = MappedColumn.open(column, sums, maps, node="b", run=RUN)
    assert mapped is not None
    runs = mapped.runs()
    assert runs is not None
    found = [
        ctypes.string_at(*each)
        for each in zip(runs.sources.tolist(), runs.nbytes.tolist(), strict=True)
    ]
    assert b"".join(found) == block
    assert runs.into.tolist() == [0, SUM_BYTES, 2 * SUM_BYTES]
    assert runs.sums.tolist() == sums.tolist()
    assert "node b, rank 0: bytes 131,072+131,072 of the column" in runs.describe(1)


@pytest.mark.parametrize(("at", "nbytes"), [(4096, 200_000), (0, 200_000), (SUM_BYTES, 1000)])
def test_a_column_with_a_part_of_a_run_has_no_runs_to_check(
    tmp_path: Path, maps: SlotMaps, at: int, nbytes: int
) -> None:
    _, column, sums, _ = sealed(tmp_path / "1.slot")
    first, count = runs_of(at, nbytes)
    span = msgspec.structs.replace(column.spans[0], at=at, nbytes=nbytes, first=first, count=count)
    partial = Column(host=column.host, spans=(span,))
    mapped = MappedColumn.open(partial, sums[first : first + count], maps, node="b", run=RUN)
    assert mapped is not None and mapped.runs() is None


def test_a_slot_that_was_given_away_is_not_current(tmp_path: Path, maps: SlotMaps) -> None:
    slot, column, sums, _ = sealed(tmp_path / "1.slot")
    mapped = MappedColumn.open(column, sums, maps, node="b", run=RUN)
    slot.write_header(SlotHeader(state=SlotState.EMPTY), run=RUN)
    assert mapped is not None and not mapped.is_current()
    assert MappedColumn.open(column, sums, maps, node="b", run=RUN) is None


def test_another_file_is_not_mapped(tmp_path: Path, maps: SlotMaps) -> None:
    slot, column, sums, _ = sealed(tmp_path / "1.slot")
    slot.path.rename(tmp_path / "away.slot")
    assert not column.spans[0].file.is_here()
    sealed(tmp_path / "1.slot")  # the same path, another file
    assert MappedColumn.open(column, sums, maps, node="b", run=RUN) is None


def test_bytes_that_changed_are_not_given_out(tmp_path: Path, maps: SlotMaps) -> None:
    slot, column, sums, block = sealed(tmp_path / "1.slot")
    mapped = MappedColumn.open(column, sums, maps, node="b", run=RUN)
    slot.block(len(block))[150_000] ^= 1
    assert mapped is not None
    with pytest.raises(CorruptError, match="node b, rank 0"):
        list(mapped.reader().parts(0, len(block)))


def test_a_row_whose_columns_moved_is_built_over_the_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sidecar_group(tmp_path, "a", "b", "c", threads=True) as group:
        _build_while_slots_move(group, monkeypatch)


def _build_while_slots_move(group: SidecarGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[int, int] = {}

    def once(self: MappedColumn) -> bool:
        calls[id(self)] = calls.get(id(self), 0) + 1
        return calls[id(self)] == 1

    monkeypatch.setattr(MappedColumn, "is_current", once)
    world = group.adopt()
    payloads = [random_payload(200_000, seed=(rank,)) for rank in range(3)]
    for rank, node in enumerate(world.rank_nodes):
        write_payload(group.clients[node], world, payloads[rank], step=1, rank=rank)
    group.await_protected(world, 1)
    for sidecar in group.sidecars.values():
        assert sidecar.core.counters["fragment_bytes_sent"] > 0
        for row in sidecar.parities.sealed((1, 1)):
            assert is_intact(row) and np.frombuffer(row.part(0, 8), dtype=np.uint8).any()
