"""Tensors that do not change are copied once; what changes them is followed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.slots import FakeSidecar
from torch import nn

from holdfast.ckpt.errors import CapacityError
from holdfast.ckpt.snapshot.pacing import FULL_SPEED, Pacer
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.state.restore import restore

BASE_BYTES = 1536 * 1024 * 4


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[FakeSidecar]:
    fake = FakeSidecar(directory=tmp_path)
    yield fake
    fake.close()


@pytest.fixture
def taking(sidecar: FakeSidecar) -> Iterator[Snapshotter]:
    made = sidecar.snapshotter()
    yield made
    made.close()


class Job:
    """A base of 6 MiB and an adapter of 4 KiB that an optimizer trains."""

    def __init__(self, *, frozen: bool = True) -> None:
        self.base = nn.Linear(1024, 1536, bias=False)
        self.base.requires_grad_(not frozen)
        self.adapter = nn.Linear(32, 32, bias=False)
        self.optimizer = torch.optim.SGD(self.adapter.parameters(), lr=0.1)
        self.step = 0

    @property
    def state(self) -> dict[str, Any]:
        return {"base": self.base, "adapter": self.adapter, "optimizer": self.optimizer}

    def take(self, taking: Snapshotter) -> None:
        self.step += 1
        self.adapter.weight.grad = torch.ones(32, 32)
        self.optimizer.step()
        taking.snapshot(self.state, self.step)
        taking.fence()


def restored(sidecar: FakeSidecar, step: int) -> Job:
    job = Job()
    with closing(sidecar.source(step)) as source:
        restore(job.state, source, rank=0)
    return job


def restored_base(sidecar: FakeSidecar, step: int) -> torch.Tensor:
    base = nn.Linear(1024, 1536, bias=False)
    with closing(sidecar.source(step)) as source:
        restore({"base": base}, source, rank=0, strict=False)
    return base.weight


def copied(taking: Snapshotter, job: Job) -> int:
    before = taking.stats.bytes
    job.take(taking)
    return taking.stats.bytes - before


def test_frozen_weights_are_copied_with_the_first_snapshot_alone(
    sidecar: FakeSidecar, taking: Snapshotter
) -> None:
    job = Job()
    assert copied(taking, job) == BASE_BYTES + 4096
    for _ in range(3):
        assert copied(taking, job) == 4096
        assert taking.stats.fixed_bytes == BASE_BYTES
    (part,) = sidecar.directory.glob("*.slot-fixed")
    assert BASE_BYTES <= part.stat().st_size < BASE_BYTES + (1 << 18)
    assert all(slot.stat().st_size < 1 << 18 for slot in sidecar.directory.glob("*.slot"))
    for step in range(1, job.step + 1):
        assert torch.equal(restored(sidecar, step).base.weight, job.base.weight)
    assert torch.equal(restored(sidecar, job.step).adapter.weight, job.adapter.weight)


def test_the_check_of_frozen_weights_counts_as_work_until_the_next_step(
    taking: Snapshotter, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced: list[int] = []

    def speed(_: Pacer, nbytes: int, *, late_s: float = 0.0) -> float:
        paced.append(nbytes)
        return FULL_SPEED

    monkeypatch.setattr(Pacer, "speed", speed)
    job = Job()
    for _ in range(3):
        job.take(taking)
    assert paced == [BASE_BYTES + 4096] * 3, "a small copy would end late, and the check later"


def test_weights_that_stay_the_same_become_fixed_without_a_word(taking: Snapshotter) -> None:
    job = Job(frozen=False)
    sizes = [copied(taking, job) for _ in range(8)]
    assert sizes == [BASE_BYTES + 4096] * 6 + [4096] * 2


@pytest.mark.parametrize("kind", ["a weight", "a loose tensor", "another loose tensor"])
def test_what_every_step_writes_anew_is_never_fixed_though_its_bytes_stay_the_same(
    sidecar: FakeSidecar, taking: Snapshotter, kind: str
) -> None:
    """As an optimizer writes the moments of weights whose gradients are zero."""
    job, table = Job(frozen=False), torch.ones(1536, 1024)
    loose = {"table": table} if kind != "a weight" else {}
    for step in range(12):
        if kind == "another loose tensor":
            loose["table"] = loose["table"].clone()
        with torch.no_grad():
            job.base.weight.mul_(1.0)
            table.mul_(1.0)
        taking.snapshot({**job.state, **loose}, step)
        taking.fence()
        assert not list(sidecar.directory.glob("*.slot-fixed"))


def test_a_layer_that_is_trained_again_is_copied_again(
    sidecar: FakeSidecar, taking: Snapshotter
) -> None:
    job = Job()
    job.take(taking)
    job.take(taking)
    with torch.no_grad():
        job.base.weight[3] += 1
    assert copied(taking, job) == BASE_BYTES + 4096
    assert torch.equal(restored(sidecar, job.step).base.weight, job.base.weight)
    assert not torch.equal(restored(sidecar, job.step - 1).base.weight, job.base.weight)
    assert copied(taking, job) == BASE_BYTES + 4096, "it has to stay the same for long now"


def test_a_change_without_a_trace_is_found_and_told_and_never_restored_as_right(
    sidecar: FakeSidecar, taking: Snapshotter, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    job.take(taking)
    job.base.weight.data[7, 7] += 1
    with caplog.at_level(logging.WARNING):
        job.take(taking)
    assert "base.weight changed without a trace that torch could see" in caplog.text
    assert (job.step, 0) not in sidecar.sealed
    assert taking.stats.torn == "base.weight"
    assert copied(taking, job) == BASE_BYTES + 4096
    assert torch.equal(restored(sidecar, job.step).base.weight, job.base.weight)


def test_a_change_that_torch_counts_during_the_check_is_told_as_what_it_is(
    sidecar: FakeSidecar, taking: Snapshotter, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    job.take(taking)
    sidecar.gate.clear()
    taking.snapshot(job.state, 2)
    with torch.no_grad():
        job.base.weight.add_(1)
    with caplog.at_level(logging.WARNING):
        sidecar.gate.set()
        taking.fence()
    assert "base.weight was written to while the snapshot was checked" in taking.stats.reason
    assert "without a trace" not in caplog.text
    assert (2, 0) not in sidecar.sealed
    job.step = 2
    assert copied(taking, job) == BASE_BYTES + 4096


def test_without_room_for_a_fixed_part_everything_is_copied(
    sidecar: FakeSidecar, taking: Snapshotter
) -> None:
    job = Job()
    sidecar.refuse = CapacityError("no room")
    job.take(taking)
    assert taking.stats.left_out == 1
    assert copied(taking, job) == copied(taking, job) == BASE_BYTES + 4096
    assert not list(sidecar.directory.glob("*.slot-fixed"))


def test_without_room_for_a_larger_part_the_one_before_stays_in_use(
    sidecar: FakeSidecar, taking: Snapshotter
) -> None:
    job = Job()
    more = nn.Linear(1024, 600, bias=False)
    job.optimizer.add_param_group({"params": [more.weight], "lr": 0.0})
    job.adapter.add_module("more", more)
    for _ in range(5):
        job.take(taking)
    sidecar.refuse = CapacityError("no room")
    job.take(taking)
    assert taking.stats.left_out == 1
    for _ in range(3):
        assert copied(taking, job) == 4096 + more.weight.nbytes
        assert torch.equal(restored_base(sidecar, job.step), job.base.weight)


def test_a_fixed_part_that_is_gone_is_filled_again(
    sidecar: FakeSidecar, taking: Snapshotter
) -> None:
    job = Job()
    job.take(taking)
    sidecar.forgets_fixed = True
    job.take(taking)
    assert (job.step, 0) not in sidecar.sealed
    assert copied(taking, job) == BASE_BYTES + 4096
    assert copied(taking, job) == 4096
    assert torch.equal(restored(sidecar, job.step).base.weight, job.base.weight)


def test_a_state_smaller_than_it_pays_has_no_fixed_part(
    sidecar: FakeSidecar, taking: Snapshotter
) -> None:
    small = nn.Linear(8, 8).requires_grad_(False)
    for step in range(8):
        taking.snapshot({"small": small}, step)
    taking.fence()
    assert not list(sidecar.directory.glob("*.slot-fixed"))
