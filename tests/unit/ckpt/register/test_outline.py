"""A state is restored from a step with a register as from one without: every kind of entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.ckpt.checkpoints.commit import commit, write_pack
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import CorruptError, MismatchError
from holdfast.ckpt.register.outline import StoredTrees
from holdfast.ckpt.state.restore import RestoreReport, restore
from holdfast.ckpt.state.saved import SavedState, read_tensors
from holdfast.ckpt.state.trees.per_rank import PerRank
from holdfast.ckpt.testing.shards import capture

WAYS = {"with a register": 1, "without": 2}


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
        if tied:
            self.outer.weight = self.inner.weight


def gathered(values: list[Any], rank: int, world_size: int) -> list[Any]:
    return [value for each in values for value in each][rank::world_size]


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Tied(tied=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (seed + 1))
    model.outer(model.inner(torch.ones(6))).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "cursor": (seed, {"epoch": seed}),
        "array": np.full((3, 5), seed),
        "rng": PerRank(np.random.default_rng(seed)),
        "buffer": PerRank(torch.full((70_000,), float(seed))),
        "queue": PerRank([seed, seed + 1], on_resize=gathered),
        "none": torch.zeros(0, 4),
    }


def saved(root: Path, state: dict[str, Any], *, register_from: int) -> StoreSource:
    index, payload = capture(state, step=3)
    receipt = write_pack(root, step=3, index=index, payload=memoryview(payload))
    commit(
        root,
        run="test",
        step=3,
        generation=1,
        receipts=[receipt],
        mesh={},
        register_from=register_from,
    )
    return StoreSource(root, 3)


def flat(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {name: each.tolist() for name, each in state["model"].state_dict().items()},
        "optimizer": repr(state["optimizer"].state_dict()),
        "rng": state["rng"].value.bit_generator.state,
        "buffer": state["buffer"].value.tolist(),
        "queue": state["queue"].value,
        "array": state["array"].tolist(),
    }


@pytest.mark.parametrize("world", [1, 2])
def test_all_kinds_of_entries_come_back(tmp_path: Path, world: int) -> None:
    found: dict[str, tuple[RestoreReport, dict[str, Any]]] = {}
    for way, register_from in WAYS.items():
        with saved(tmp_path / way, make(1), register_from=register_from) as source:
            state = make(2)
            report = restore(state, source, rank=world - 1, world_size=world)
            found[way] = report, flat(state)
    (ours, state), (theirs, other) = found.values()
    assert state == other
    assert (ours.bytes, ours.tensors, ours.ranks) == (theirs.bytes, theirs.tensors, theirs.ranks)
    assert (ours.kept, ours.missing, ours.extra) == (theirs.kept, theirs.missing, theirs.extra)


@pytest.mark.parametrize("register_from", WAYS.values(), ids=WAYS)
def test_tensors_that_are_one_here_are_compared_as_a_whole(
    tmp_path: Path, register_from: int
) -> None:
    with (
        saved(tmp_path, {"model": Tied(tied=False)}, register_from=register_from) as source,
        pytest.raises(MismatchError, match="are one tensor here"),
    ):
        restore({"model": Tied(tied=True)}, source, rank=0, world_size=1)


@pytest.mark.parametrize("register_from", WAYS.values(), ids=WAYS)
def test_keys_that_differ_are_named(tmp_path: Path, register_from: int) -> None:
    with saved(tmp_path, make(1), register_from=register_from) as source:
        state = make(2) | {"more": torch.ones(2)}
        del state["array"], state["buffer"]
        with pytest.raises(MismatchError) as caught:
            restore(state, source, rank=0, world_size=1)
    for words in ("missing: more", "extra: array", "extra: per-rank value buffer"):
        assert words in str(caught.value)


def test_values_of_ranks_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    with saved(tmp_path, make(1), register_from=1) as source:
        assert source.register is not None
        trees = SavedState.of(source).ranks["queue"]
        before = source.register.bytes_read
        assert isinstance(trees, StoredTrees)
        assert ([*trees], len(trees), 0 in trees, 1 in trees) == ([0], 1, True, False)
        assert source.register.bytes_read == before
        assert trees[0] == [1, 2]
        once = source.register.bytes_read
        assert once > before
        assert [*trees.values()] == [[1, 2]]
        assert [*trees.items()] == [(0, [1, 2])]
        assert source.register.bytes_read == once
        with pytest.raises(KeyError):
            trees[1]


def test_a_value_that_the_register_does_not_have_is_damage(tmp_path: Path) -> None:
    with saved(tmp_path, make(1), register_from=1) as source:
        assert source.register is not None
        trees = StoredTrees(source.register, "queue", [(0, 3)])
        with pytest.raises(CorruptError, match=r"lists no value queue of ranks \[2\]"):
            trees[2]


@pytest.mark.parametrize("register_from", WAYS.values(), ids=WAYS)
def test_whole_tensors_are_read_by_name(tmp_path: Path, register_from: int) -> None:
    state = make(1)
    wanted = ["model.inner.weight", "model.outer.weight", "none"]
    with saved(tmp_path, state, register_from=register_from) as source:
        assert {*wanted} <= {*source.names()}
        part = source.tensors([*wanted, "nobody"])
        found = SavedState.of(part)
        assert found.specs["none"].shape == (0, 4)
        assert {*wanted} <= found.specs.keys() | found.aliases.keys()
        assert "nobody" not in found.specs
        read = read_tensors(part, wanted)
        for name in wanted[:2]:
            assert torch.equal(read[name], state["model"].inner.weight)
        if source.register is not None:
            assert found.specs.keys() == {found.aliases.get(name, name) for name in wanted}
            assert SavedState.of(source.tensors(["none"])).specs.keys() == {"none"}
