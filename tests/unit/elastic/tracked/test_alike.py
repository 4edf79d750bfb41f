"""Ranks that hold different state where it has to be equal are named, and no others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.ckpt.state.capture import CapturePlan, flatten
from holdfast.ckpt.state.local_boxes import TensorShard
from holdfast.ckpt.state.trees.per_rank import PerRank
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups import contents
from holdfast.elastic.groups.contents import EVERY, is_due
from holdfast.elastic.tracked import alike
from holdfast.elastic.tracked.alike import ReplicaCheck

State = dict[str, Any]


@dataclass
class Meeting:
    """A place in which ranks that are threads exchange values."""

    size: int
    gathered: int = 0
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=20)


class Rank:
    """One rank of a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def gather(self, value: Any) -> list[Any]:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait()
        found = [self.meeting.values[rank] for rank in range(self.size)]
        self.meeting.barrier.wait()
        if self.rank == 0:
            self.meeting.gathered += 1
        return found

    def max_(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self.gather(tensor.clone())).amax(0))


def compare(
    make: Callable[[int], State],
    *,
    size: int = 2,
    exact: bool = True,
    cell: int = 1,
    restored: bool = False,
    snapshots: int = 1,
    change: Callable[[State, int, int], None] = lambda state, rank, number: None,
) -> tuple[set[str], int]:
    """Return the refusals of all ranks over some snapshots, and the number of gathers."""
    meeting = Meeting(size)
    states = [make(rank) for rank in range(size)]

    def run(rank: int) -> str:
        world = Rank(meeting, rank)
        check = ReplicaCheck(world, cell=cell, exact=exact, restored=restored)
        plan: CapturePlan | None = None
        for number in range(snapshots):
            change(states[rank], rank, number)
            flat = flatten(states[rank], rank=rank)
            if plan is None:
                plan = CapturePlan.build(flat, rank=rank, world_size=size, gather=world.gather)
                meeting.gathered = 0
            try:
                check.look(flat, plan, step=number)
            except ConfigError as error:
                return str(error)
        return ""

    with ThreadPoolExecutor(size) as pool:
        return set(pool.map(run, range(size))), meeting.gathered


class Ledger:
    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state


def refusal(make: Callable[[int], State], **options: Any) -> str:
    (said,), _ = compare(make, **options)
    return said


def test_a_tensor_is_named_with_two_ranks_and_both_remedies() -> None:
    said = refusal(
        lambda rank: {"same": torch.ones(3), "buf": {"t": torch.full((5,), rank // 2)}}, size=3
    )
    assert said.startswith("run.track: buf.t differs between rank 0 and rank 2 as it was built")
    assert "broadcast" in said
    assert "run.track(buf=holdfast.PerRank(...))" in said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda rank: {"n": {"deep": [1, rank]}}, "n.deep.1 differs .*: 0 and 1"),
        (lambda rank: {"ob": Ledger(v=torch.ones(2), p=f"from {rank}")}, 'ob.p .*"from 0" and '),
        (lambda rank: {"ob": Ledger(v=torch.full((2,), rank))}, "ob.v differs"),
        (lambda rank: {"rng": np.random.default_rng(rank)}, "rng.numpy.state"),
        (lambda rank: {"a": np.full((2, 3), rank).T}, "a differs"),
        (
            lambda rank: {"more": {"k": 1} if rank else {"k": 1, "l": None}},
            "more.l .*: null and no",
        ),
    ],
)
def test_values_objects_arrays_and_generators_are_compared(value: Any, said: str) -> None:
    import re

    assert re.search(said, refusal(value))


def test_equal_states_pass_with_one_small_exchange() -> None:
    def make(rank: int) -> State:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        return {"model": model, "n": {"k": 1}, "o": torch.optim.AdamW(model.parameters())}

    assert compare(make) == ({""}, 2)  # the size of the state, and one number


def test_what_belongs_to_one_rank_is_not_compared() -> None:
    def make(rank: int) -> State:
        shard = TensorShard(torch.full((2,), rank), shape=(4,), offset=(2 * rank,))
        return {"own": PerRank(torch.full((3,), rank)), "shard": shard, f"stage{rank}": [rank]}

    assert compare(make)[0] == {""}


def test_replicas_of_a_shard_are_compared_with_each_other() -> None:
    def make(rank: int, *, wrong: int = 9) -> State:
        part = torch.full((2,), float(rank % 2) + (rank == wrong))
        return {"w": TensorShard(part, shape=(4,), offset=(2 * (rank % 2),))}

    assert compare(make, size=4)[0] == {""}
    said = refusal(lambda rank: make(rank, wrong=3), size=4)
    assert "w differs between rank 1 and rank 3" in said


def test_a_scalar_of_an_optimizer_belongs_to_its_part_of_the_parameter() -> None:
    def make(rank: int) -> State:
        part = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([part])
        if rank == 0:  # an expert that got no tokens at the other rank
            part.grad = torch.ones(2)
            optimizer.step()
        zero = torch.zeros(2)
        optimizer.state[part].setdefault("step", torch.tensor(0.0))
        optimizer.state[part].setdefault("exp_avg", zero)
        optimizer.state[part].setdefault("exp_avg_sq", zero.clone())
        return {
            "expert": TensorShard(part, shape=(4,), offset=(2 * rank,)),
            "optimizer": optimizer,
        }

    assert compare(make)[0] == {""}


@pytest.mark.parametrize("exact", [True, False])
def test_buffers_that_a_forward_outside_of_the_passes_changed_are_named(exact: bool) -> None:
    def make(rank: int) -> State:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(2)
        norm(torch.full((2, 2), float(rank)))
        return {"norm": norm}

    assert "norm.running_mean differs" in refusal(make, exact=exact)


def test_ranks_that_compute_one_microbatch_may_round_differently_without_exact() -> None:
    def make(rank: int, *, wrong: int = 9) -> State:
        return {
            "w": torch.full((2,), rank % 2 + (rank == wrong) * 0.5),
            "n": torch.ones(2, dtype=int),
        }

    assert compare(make, size=4, cell=2, exact=False)[0] == {""}
    said = refusal(lambda rank: make(rank, wrong=2), size=4, cell=2, exact=False)
    assert "w differs between rank 0 and rank 2" in said
    assert "w differs between rank 0 and rank 1" in refusal(make, size=4, cell=2, exact=True)


def test_a_difference_that_comes_later_is_found_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alike, "BLOCK_BYTES", 64)
    monkeypatch.setattr(contents, "BLOCK_BYTES", 64)
    monkeypatch.setattr(contents, "_SAMPLE_BYTES", 64)
    for at in (0, 17, 511):

        def change(state: State, rank: int, number: int, at: int = at) -> None:
            if rank == 1 and number == 3:
                state["w"][at] += 1

        said = refusal(
            lambda rank: {"w": torch.zeros(512), "t": torch.zeros(4, 4).t()},
            restored=True,
            snapshots=EVERY * 64 + 1,
            change=change,
        )
        assert "w differs between rank 0 and rank 1 after step" in said


def test_comparisons_come_soon_at_first_and_then_every_so_often() -> None:
    due = [number for number in range(50) if is_due(number)]
    assert due == [0, 1, 2, 4, 8, 16, 32, 48]


def test_values_of_the_leader_may_differ() -> None:
    meeting = Meeting(2)

    def run(rank: int) -> None:
        world = Rank(meeting, rank)
        check = ReplicaCheck(world, cell=1, exact=True, restored=False, of_leader={"ledger"})
        flat = flatten({"ledger": Ledger(n=rank)})
        plan = CapturePlan.build(flat, rank=rank, world_size=2, gather=world.gather)
        check.look(flat, plan, step=0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))


def test_one_rank_compares_nothing() -> None:
    assert compare(lambda rank: {"t": torch.ones(1)}, size=1) == ({""}, 0)
