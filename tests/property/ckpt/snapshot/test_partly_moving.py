"""Slots that are written again in part hold the whole state, and tell rightly what has changed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.slots import FakeSidecar
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.ckpt.errors import GivenUpError
from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.block import block_bytes
from holdfast.ckpt.native.sums import SUM_BYTES
from holdfast.ckpt.snapshot import copy_program
from holdfast.ckpt.snapshot.part_memory import PartCopy, PartMemory
from holdfast.ckpt.snapshot.run_cuts import Cover
from holdfast.ckpt.snapshot.settings import CopySettings
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.state.restore import restore

ROWS, WIDTH = 400, 257  # about three runs, none of which ends with a row


def row_of(number: int) -> int:
    """Return one of a few rows, in all parts of the buffer."""
    return number * 53 % ROWS


class Ring:
    """A ring buffer that is filled row by row, a table of which a few rows are trained, a weight.

    Its `touch` names the rows that it writes.
    """

    def __init__(self) -> None:
        self.ring = torch.zeros(ROWS, WIDTH)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.dense = nn.Linear(8, 8)
        nn.init.ones_(self.table.weight)
        self.optimizer = torch.optim.SGD([*self.table.parameters(), *self.dense.parameters()], 0.1)

    def state(self) -> dict[str, Any]:
        return {
            "ring": self.ring,
            "table": self.table,
            "dense": self.dense,
            "optimizer": self.optimizer,
        }

    def tensors(self) -> list[torch.Tensor]:
        found = [self.ring, self.table.weight, *self.dense.parameters()]
        return [tensor.detach().clone() for tensor in found]

    def train(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.table(torch.tensor([number % ROWS])).sum().backward()
        self.dense(torch.ones(8)).square().sum().backward()
        self.optimizer.step()

    def act(self, action: str, number: int, touch: Callable[[torch.Tensor, Any], None]) -> None:
        match action:
            case "write a row" | "write a row and name it":
                self.ring[row_of(number)] = float(number % 3)  # often what was there before
            case "write everything":
                self.ring += 1
            case "unseen write":
                self.ring.numpy()[number % ROWS] += 1
            case "another tensor":
                self.ring = self.ring + 1
            case "write to the table":
                self.table.weight.data[number % ROWS] += 1
        if action == "write a row and name it":
            touch(self.ring, row_of(number))


FAULTS = ("given up", "damage a free slot", "another rank writes to a free slot")
ACTIONS = (
    *["write a row and name it"] * 6,
    *["write a row"] * 4,
    "nothing",
    "write everything",
    "unseen write",
    "another tensor",
    "write to the table",
    *FAULTS,
)


@dataclass
class Outcome:
    """The steps that were kept, those with wrong bytes, the wrong claims, the bytes written."""

    kept: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    claims: list[tuple[int, int]] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


def _fault(sidecar: FakeSidecar, action: str, number: int) -> None:
    if action == "given up":
        sidecar.refuse = GivenUpError("another rank gave it up")
    for path, (slot, _) in list(sidecar.free.items())[:1]:
        room = slot.block(slot.capacity)[slot.fixed_bytes :]  # the fixed part is mapped read-only
        if action == "damage a free slot":
            room[number * 4999 % len(room)] ^= 1
        elif action == "another rank writes to a free slot":
            part = room[: 2 * SUM_BYTES]
            part[:] = bytes([number % 256]) * len(part)
            sidecar.free[path] = (slot, (1, 0, 9))


def taken(steps: Sequence[Sequence[tuple[str, int]]]) -> Outcome:
    """Train and take a snapshot after each step; compare each one that was kept."""
    job, found, blocks = Ring(), Outcome(), dict[int, bytes]()
    with tempfile.TemporaryDirectory() as folder:
        sidecar = FakeSidecar(directory=Path(folder), recycles=True)
        taking = sidecar.snapshotter(copying=CopySettings(fixed_bytes=2 * SUM_BYTES, paced=False))
        with closing(sidecar), closing(taking):
            for step, actions in enumerate(steps):
                job.train(step * 13)
                for action, number in actions:
                    taking.copied()  # as the pre-hook of an optimizer does
                    job.act(action, number, _naming(taking, actions))
                    _fault(sidecar, action, number)
                before = taking.stats.bytes
                taking.snapshot(job.state(), step)
                taking.fence()
                found.copied.append(taking.stats.bytes - before)
                if (step, 0) in sidecar.sealed:
                    _compare(sidecar, job, step, found, blocks)
    return found


def _naming(
    taking: Snapshotter, actions: Sequence[tuple[str, int]]
) -> Callable[[torch.Tensor, Any], None]:
    """Return the call that names rows; it is left out where the step writes other rows, too."""
    writes = {"write a row", "write everything", "unseen write", "another tensor"}
    honest = not any(action in writes for action, _ in actions)
    return taking.touched if honest else lambda *_: None


def _compare(
    sidecar: FakeSidecar, job: Ring, step: int, found: Outcome, blocks: dict[int, bytes]
) -> None:
    found.kept.append(step)
    other = Ring()
    with closing(sidecar.source(step)) as source:
        restore(other.state(), source, rank=0)
    if not all(map(torch.equal, other.tensors(), job.tensors())):
        found.wrong.append(step)
    entry = sidecar.sealed[step, 0]
    block = bytes(sidecar.slot(step).block(block_bytes(entry)))
    since = sidecar.since[step]
    for older, bytes_then in blocks.items():
        for run in np.flatnonzero(since <= older).tolist():
            part = slice(run * SUM_BYTES, (run + 1) * SUM_BYTES)
            if bytes_then[part] != block[part]:
                found.claims.append((step, older))
    blocks[step] = block


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 20)), max_size=2),
        min_size=4,
        max_size=16,
    )
)
def test_every_kept_snapshot_has_the_state_of_its_step(
    steps: list[list[tuple[str, int]]],
) -> None:
    found = taken(steps)
    faults = [each for acts in steps for each, _ in acts if each in FAULTS]
    assert not found.wrong
    assert not found.claims
    assert len(found.kept) >= len(steps) - 2 * len(faults)


def _ring(count: int, action: str) -> list[list[tuple[str, int]]]:
    return [[(action, step)] for step in range(count)]


@pytest.mark.parametrize("action", ["write a row", "write a row and name it", "unseen write"])
def test_only_the_parts_that_changed_are_written(action: str) -> None:
    found = taken(_ring(14, action))
    assert len(found.kept) == 14
    assert 2 * max(found.copied[8:]) < found.copied[0]


def _any_block(open_slot: Callable[..., PartCopy]) -> Callable[..., PartCopy]:
    """Take the bytes of any slot for the block that was written there last by this rank."""

    def opened(memory: PartMemory, slot: SlotFile, **given: Any) -> PartCopy:
        held = memory._slots.get(str(slot.path))
        return open_slot(memory, slot, **given | {"before": held.key if held else None})

    return opened


@pytest.mark.parametrize("bug", ["slots", "claims", "rows"])
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "write a row and name it"
    steps = [*_ring(10, name), [("another tensor", 1)], [(name, 5)], *_ring(3, name)]
    if bug == "slots":
        steps[9].append(("another rank writes to a free slot", 1))
    before = taken(steps)
    assert not before.wrong
    assert not before.claims
    match bug:
        case "slots":
            monkeypatch.setattr(PartMemory, "open", _any_block(PartMemory.open))
        case "claims":
            monkeypatch.setattr(Cover, "newest", lambda _, since, **__: since * 0)
        case "rows":
            monkeypatch.setattr(copy_program, "touched_bytes", lambda _, __, at, ___: at < 0)
            monkeypatch.setattr(copy_program, "check_turn", lambda count, _: np.zeros(count, bool))
    found = taken(steps)
    assert found.wrong or found.claims or len(found.kept) < len(before.kept)
