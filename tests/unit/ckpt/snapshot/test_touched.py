"""Rows that a user names: only they are read, and a wrong statement is found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.slots import FakeSidecar
from torch import nn

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.native.sums import SUM_BYTES
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.snapshot.touched import Rows, TouchedRows, row_numbers, touched_bytes
from holdfast.ckpt.state.restore import restore

WIDTH = 4096
ROWS_OF_A_PART = SUM_BYTES // (4 * WIDTH)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[FakeSidecar]:
    with closing(FakeSidecar(directory=tmp_path, recycles=True)) as fake:
        yield fake


@pytest.fixture
def taking(sidecar: FakeSidecar) -> Iterator[Snapshotter]:
    with closing(sidecar.snapshotter()) as made:
        yield made


class Replay:
    """A buffer of 640 rows in 80 parts."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(80 * ROWS_OF_A_PART, WIDTH)
        self.model = nn.Linear(4, 4)
        self.step = 0

    @property
    def state(self) -> dict[str, Any]:
        return {"buffer": self.buffer, "model": self.model}

    def take(self, taking: Snapshotter) -> int:
        """Take a snapshot; return the bytes copied."""
        self.step += 1
        before = taking.stats.bytes
        taking.snapshot(self.state, self.step)
        taking.fence()
        return taking.stats.bytes - before

    def is_kept(self, sidecar: FakeSidecar) -> bool:
        other = Replay()
        with closing(sidecar.source(self.step)) as source:
            restore(other.state, source, rank=0)
        return torch.equal(other.buffer, self.buffer)


def learned(taking: Snapshotter, *, rows: bool) -> Replay:
    """Take snapshots until each slot of the buffer was compared once."""
    replay = Replay()
    for step in range(7):
        replay.buffer[step] = 1.0
        if rows:
            taking.touched(replay.buffer, step)
        replay.take(taking)
    return replay


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (3, [3]),
        (-1, [9]),
        (slice(2, 5), [2, 3, 4]),
        (slice(8, 99), [8, 9]),
        ([0, 7, 7], [0, 7, 7]),
        (torch.tensor([4, -2]), [4, 8]),
        (torch.arange(10) > 7, [8, 9]),
        ([], []),
    ],
)
def test_rows_are_named_in_all_the_ways_in_which_tensors_are_indexed(
    rows: Rows, found: list[int]
) -> None:
    assert row_numbers(rows, 10).tolist() == found


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (10, "names row 10 of a tensor that has 10"),
        ([1, -11], "names row -11"),
        (torch.ones(9, dtype=torch.bool), "[9] flags for a tensor of 10 rows"),
        ("all", "cannot take str for rows"),
    ],
)
def test_rows_that_are_not_there_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(StateError, match=re.escape(message)):
        row_numbers(rows, 10)


@pytest.mark.parametrize("tensor", [torch.tensor(1.0), torch.zeros(4, 6)[:, :3], [1, 2]])
def test_only_a_contiguous_tensor_has_rows_that_can_be_named(tensor: Any) -> None:
    with pytest.raises(StateError, match="takes a contiguous tensor with rows"):
        TouchedRows().note(tensor, 0)


def test_a_range_of_bytes_is_touched_by_every_row_that_reaches_into_it() -> None:
    rows = np.array([False, True, False, False])
    at = np.array([0, 5, 9, 19, 20, 30])
    found = touched_bytes(rows, 10, at, np.array([5, 5, 2, 1, 10, 10]))
    assert found.tolist() == [False, False, True, True, False, False]


def test_a_tensor_that_is_not_tracked_is_refused_with_the_next_snapshot(
    sidecar: FakeSidecar, taking: Snapshotter
) -> None:
    replay = Replay()
    taking.touched(torch.zeros(4, 4), 0)
    with pytest.raises(StateError, match=r"no tracked buffer or tensor of its own"):
        replay.take(taking)
    taking.touched(replay.model.weight.detach(), 0)
    with pytest.raises(StateError, match=r"parameters and the state of optimizers need none"):
        replay.take(taking)
    replay.take(taking)
    assert replay.is_kept(sidecar)


def test_named_rows_are_written_and_nothing_else_is(
    sidecar: FakeSidecar, taking: Snapshotter
) -> None:
    replay = learned(taking, rows=True)
    for step in range(3):
        replay.buffer[100 + step] = 2.0
        taking.touched(replay.buffer, slice(100, 101 + step))
        taking.touched(replay.buffer, [100 + step])
        assert replay.take(taking) <= 2 * SUM_BYTES + 1024
        assert replay.is_kept(sidecar)


def test_rows_may_be_named_at_some_steps_and_not_at_others(
    sidecar: FakeSidecar, taking: Snapshotter
) -> None:
    replay = learned(taking, rows=False)
    for step in range(6):
        row = 50 * step + 3
        replay.buffer[row] = 3.0
        if step % 2:
            taking.touched(replay.buffer, row)
        else:
            replay.buffer[-row] = 4.0
        replay.take(taking)
        assert replay.is_kept(sidecar)


def test_a_row_that_was_not_named_is_found_told_and_kept_from_then_on(
    sidecar: FakeSidecar, taking: Snapshotter, caplog: pytest.LogCaptureFixture
) -> None:
    replay = learned(taking, rows=True)
    replay.buffer[600] = 5.0
    for _ in range(64):
        replay.buffer[1] += 1
        taking.touched(replay.buffer, 1)
        replay.take(taking)
        if "did not name" in caplog.text:
            break
    assert "rows of buffer have changed" in caplog.text
    assert replay.is_kept(sidecar)
    replay.buffer[601] = 6.0
    taking.touched(replay.buffer, 1)
    replay.take(taking)
    assert replay.is_kept(sidecar)
    assert caplog.text.count("did not name") == 1


def test_another_tensor_in_the_place_of_the_named_one_is_read_whole(
    sidecar: FakeSidecar, taking: Snapshotter
) -> None:
    replay = learned(taking, rows=True)
    replay.buffer = replay.buffer + 1
    taking.touched(replay.buffer, 0)
    replay.take(taking)
    assert replay.is_kept(sidecar)


def test_bytes_that_decay_in_a_slot_are_written_again(
    sidecar: FakeSidecar, taking: Snapshotter
) -> None:
    replay = learned(taking, rows=False)
    for slot, _ in sidecar.free.values():
        slot.block(slot.capacity)[40 * SUM_BYTES] ^= 1
    kept = 0
    for step in range(4):  # a real sidecar checks a sample of what is sealed, the double all of it
        replay.buffer[step] += 1
        replay.take(taking)
        kept += replay.step in {each for each, _ in sidecar.sealed}
    assert kept >= 3
    assert replay.is_kept(sidecar)
