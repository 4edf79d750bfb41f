"""Every snapshot that is kept has the state of its step, however the state was changed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.slots import FakeSidecar
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.ckpt.errors import GivenUpError
from holdfast.ckpt.snapshot.copy_program import Program
from holdfast.ckpt.snapshot.fixed_part import FixedPieces
from holdfast.ckpt.snapshot.snapshotter import CopySettings, Snapshotter
from holdfast.ckpt.state.restore import restore


class Job:
    """A base that is frozen at first, an adapter that is trained, a buffer and a loose tensor."""

    def __init__(self) -> None:
        self.base = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40, bias=False))
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(8, 8)
        self.adapter.register_buffer("table", torch.arange(3000.0))
        self.average = torch.zeros(2000)
        self.ring = torch.zeros(1500)
        self.numpy = self.ring.numpy()
        self.optimizer = torch.optim.AdamW(self.adapter.parameters(), lr=0.1)

    def state(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "adapter": self.adapter,
            "average": self.average,
            "ring": self.ring,
            "optimizer": self.optimizer,
        }

    def tensors(self) -> list[torch.Tensor]:
        states = self.optimizer.state.values()
        found = [
            *self.base.state_dict().values(),
            *self.adapter.state_dict().values(),
            *(tensor for entry in states for tensor in entry.values()),
            self.average,
            self.ring,
        ]
        return [tensor.detach().clone() for tensor in found]

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.adapter(torch.ones(8)).square().sum().backward()
        self.optimizer.step()

    def act(self, action: str, number: int) -> None:
        """Change the state; the names with "unseen" leave no trace that torch counts."""
        with torch.no_grad():
            match action:
                case "write a weight":
                    self.base[0].weight[number % 64] += 1
                case "unseen write":
                    self.base[number % 2].weight.data[number % 40] += 1
                case "average":
                    self.average.lerp_(torch.full((2000,), float(number)), 0.5)
                case "numpy":
                    self.numpy[number % 1500] += 1
                case "buffer":
                    self.adapter.table.add_(1)
                case "another buffer":
                    self.adapter.table = self.adapter.table + 1
                case "another weight":
                    self.base[1].weight = nn.Parameter(self.base[1].weight + 1, requires_grad=False)
                case "unfreeze":
                    self.base.requires_grad_(True)
                case "freeze":
                    self.base.requires_grad_(False)


ACTIONS = (
    *["nothing"] * 6,
    "write a weight",
    "unseen write",
    "average",
    "numpy",
    "buffer",
    "another buffer",
    "another weight",
    "unfreeze",
    "freeze",
    "given up",
    "lost part",
)


@contextmanager
def snapshots(sidecar: FakeSidecar) -> Iterator[Snapshotter]:
    made = sidecar.snapshotter(copying=CopySettings(fixed_bytes=4096, paced=False))
    try:
        yield made
    finally:
        made.close()


def restored(sidecar: FakeSidecar, step: int) -> list[torch.Tensor]:
    job = Job()
    job.train()
    with closing(sidecar.source(step)) as source:
        restore(job.state(), source, rank=0)
    return job.tensors()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), max_size=2),
        min_size=3,
        max_size=25,
    )
)
def test_every_kept_snapshot_has_the_state_of_its_step(
    steps: list[list[tuple[str, int]]],
) -> None:
    kept, wrong = taken(steps)
    refused = [each for acts in steps for each, _ in acts if each in REFUSED]
    assert not wrong
    assert len(kept) >= len(steps) - len(refused)


@pytest.mark.parametrize(
    ("action", "blind"),
    [
        ("unseen write", (Program,)),
        ("numpy", (Program,)),
        ("write a weight", (Program, FixedPieces)),
        ("buffer", (Program, FixedPieces)),
    ],
)
def test_a_fixed_piece_that_is_taken_for_current_after_a_change_is_found(
    action: str, blind: tuple[type, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [[], [], [], [], [], [], [], [], [(action, 3)], [], []]
    assert taken(steps)[1] == []
    looks = {
        Program: ("changed", lambda *_, **__: []),
        FixedPieces: ("_changed", lambda *_, **__: set()),
    }
    for each in blind:
        monkeypatch.setattr(each, *looks[each])
    assert taken(steps)[1] == [8, 9, 10]


def taken(steps: Sequence[Sequence[tuple[str, int]]]) -> tuple[list[int], list[int]]:
    """Train and take a snapshot after each step; return the kept steps and the wrong ones."""
    job, expected = Job(), dict[int, list[torch.Tensor]]()
    with tempfile.TemporaryDirectory() as folder:
        sidecar = FakeSidecar(directory=Path(folder))
        with snapshots(sidecar) as taking, closing(sidecar):
            for step, actions in enumerate(steps):
                job.train()
                for action, number in actions:
                    taking.copied()  # as the pre-hook of an optimizer does
                    job.act(action, number)
                    if action == "given up":
                        sidecar.refuse = GivenUpError("another rank gave it up")
                    if action == "lost part":
                        sidecar.forgets_fixed = True
                expected[step] = job.tensors()
                taking.snapshot(job.state(), step)
                taking.fence()
            kept = [step for step, _ in sidecar.sealed]
            wrong = [
                step
                for step in kept
                if not all(map(torch.equal, restored(sidecar, step), expected[step]))
            ]
            return kept, wrong


REFUSED = ("unseen write", "numpy", "given up", "lost part")
"""The actions after which one snapshot may be discarded."""
