"""Frozen weights that the program builds again: digests are kept, and compared before a restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.quantised import Quantised
from doubles.slots import FakeSidecar
from torch import nn

from holdfast import ckpt
from holdfast.ckpt import ArgumentError, MismatchError, Rebuilt, StateError
from holdfast.ckpt.state.capture import gather_alone
from holdfast.ckpt.state.flatten import flatten
from holdfast.ckpt.state.kinds import rebuilt
from holdfast.ckpt.state.restore import restore


class Net(nn.Module):
    """A frozen layer that is used twice, a frozen quantised one, buffers, and a trained head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.again = self.base
        wrapped = Quantised(torch.randint(-9, 9, (8, 8), dtype=torch.int8), torch.rand(8), 32)
        self.table = nn.Parameter(wrapped, requires_grad=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)

    def tensors(self) -> list[torch.Tensor]:
        table = self.table.data
        return [*map(torch.clone, self.base.parameters()), table.integers, table.scale]


LEFT_OUT = {"net.base.weight", "net.base.bias", "net.table.integers", "net.table.scale"}


def inspected(net: nn.Module) -> Rebuilt:
    """Return the holder of a module whose digests are known."""
    holder = Rebuilt(net)
    rebuilt.inspect(flatten({"net": holder}).rebuilt, gather=gather_alone)
    return holder


def test_digests_stand_in_the_place_of_frozen_tensors(tmp_path: Path) -> None:
    net = Net()
    ckpt.save(tmp_path, {"net": Rebuilt(net)}, step=1)
    with ckpt.open(tmp_path) as saved:
        names = set(saved.keys())
    assert names == {
        *("net.head.weight", "net.head.bias", "net.norm.weight", "net.norm.bias"),
        *("net.norm.running_mean", "net.norm.running_var", "net.norm.num_batches_tracked"),
    }
    other = Net()
    with torch.no_grad():
        other.head.weight.zero_()
    ckpt.load(tmp_path, {"net": Rebuilt(other)})
    assert torch.equal(other.head.weight, net.head.weight)


def test_other_contents_are_refused_by_name_and_nothing_changes(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"net": Rebuilt(Net())}, step=1)
    other = Net()
    with torch.no_grad():
        other.base.bias[3] += 1
        other.head.weight.zero_()
    with pytest.raises(MismatchError, match=r"net\.base\.bias was built as float32 \[8\] with"):
        ckpt.load(tmp_path, {"net": Rebuilt(other)})
    assert not other.head.weight.any()


def test_a_module_that_is_not_rebuilt_is_told_what_was_left_out(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"net": Rebuilt(Net())}, step=1)
    with pytest.raises(MismatchError, match=r"net\.base\.weight .* give its module as Rebuilt"):
        ckpt.load(tmp_path, {"net": Net()})
    thawed = Net()
    thawed.base.requires_grad_(True)
    with pytest.raises(MismatchError, match=r"net\.base\.weight .* Build it, freeze it"):
        ckpt.load(tmp_path, {"net": Rebuilt(thawed)})


def test_a_checkpoint_with_the_tensors_fills_them_and_they_are_saved_from_then_on(
    tmp_path: Path,
) -> None:
    net, other = Net(), Net(seed=1)
    ckpt.save(tmp_path, {"net": net}, step=1)
    holder = Rebuilt(other)
    ckpt.load(tmp_path, {"net": holder})
    assert all(map(torch.equal, other.tensors(), net.tensors()))
    assert not flatten({"net": holder}).left_out


def test_a_checkpoint_of_something_else_lacks_them(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"net": nn.Linear(2, 2)}, step=1)
    with pytest.raises(MismatchError, match=r"missing: net\.base\.weight float32 \[8, 8\] was not"):
        ckpt.load(tmp_path, {"net": Rebuilt(Net())}, select="net.base.*")


def write(net: Net) -> None:
    with torch.no_grad():
        net.base.weight.mul_(2)


def thaw(net: Net) -> None:
    net.base.weight.requires_grad_(True)


def replace(net: Net) -> None:
    net.base.weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)


@pytest.mark.parametrize("act", [write, thaw, replace])
def test_what_changes_is_saved_from_then_on(act: Callable[[Net], None]) -> None:
    net = Net()
    holder = inspected(net)
    first = flatten({"net": holder})
    assert first.left_out.keys() == LEFT_OUT
    assert holder.is_same(first.left_out)
    act(net)
    if act is not replace:
        assert not holder.is_same(first.left_out)
    changed = flatten({"net": holder})
    assert changed.left_out.keys() == LEFT_OUT - {"net.base.weight"}
    assert "net.base.weight" in changed.tensors
    assert "net.base.weight" not in changed.values
    net.base.requires_grad_(False)
    assert "net.base.weight" in flatten({"net": holder}).tensors


def test_what_an_object_with_a_state_of_its_own_holds_is_saved() -> None:
    class Holds:
        def __init__(self, net: Net) -> None:
            self.weight = net.base.weight

        def state_dict(self) -> dict[str, Any]:
            return {"weight": self.weight}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.weight = state["weight"]

    net = Net()
    flat = flatten({"net": Rebuilt(net), "other": Holds(net)})
    assert flat.left_out.keys() == LEFT_OUT - {"net.base.weight"}


def test_ranks_that_built_other_contents_are_named() -> None:
    def two(mine: Any) -> list[Any]:
        return [mine, {**mine, "net.base.bias": dict.fromkeys(mine["net.base.bias"], "0")}]

    flat = flatten({"net": Rebuilt(Net())})
    with pytest.raises(MismatchError, match=r"net\.base\.bias is Rebuilt, and ranks 0 and 1"):
        rebuilt.inspect(flat.rebuilt, gather=two)


def test_only_modules_can_be_rebuilt() -> None:
    with pytest.raises(ArgumentError, match="Rebuilt of a Tensor: give a module"):
        Rebuilt(torch.ones(2))  # type: ignore[arg-type]
    net = Net()
    assert rebuilt.module_of(Rebuilt(net)) is net
    assert rebuilt.module_of(net) is net
    assert repr(Rebuilt(net)) == "Rebuilt(Net)"


def test_a_restore_without_digests_is_refused_and_one_for_practice_is_not(tmp_path: Path) -> None:
    sidecar = FakeSidecar(directory=tmp_path)
    with closing(sidecar), closing(sidecar.snapshotter()) as taking:
        taking.snapshot({"net": inspected(Net())}, 1)
        taking.fence()
        with closing(sidecar.source(1)) as source:
            with pytest.raises(StateError, match="no digest of it is known"):
                restore({"net": Rebuilt(Net())}, source, rank=0)
            other = Rebuilt(Net(seed=3))
            rebuilt.trust(flatten({"net": other}).rebuilt.values())
            restore({"net": other}, source, rank=0)


def test_a_write_that_torch_does_not_count_ends_the_next_snapshot(tmp_path: Path) -> None:
    sidecar, net = FakeSidecar(directory=tmp_path), Net()
    state = {"net": inspected(net)}
    with closing(sidecar), closing(sidecar.snapshotter()) as taking:
        taking.snapshot(state, 1)
        taking.fence()
        net.base.weight.data.numpy()[0, 0] += 1
        taking.snapshot(state, 2)
        with pytest.raises(StateError, match=r"net\.base\.weight is frozen and tracked as Rebuilt"):
            taking.fence()
    assert list(sidecar.sealed) == [(1, 0)]


def test_a_counted_write_before_the_seal_leaves_the_snapshot_out(tmp_path: Path) -> None:
    sidecar, net = FakeSidecar(directory=tmp_path), Net()
    state = {"net": inspected(net)}
    with closing(sidecar), closing(sidecar.snapshotter()) as taking:
        sidecar.gate.clear()
        taking.snapshot(state, 1)
        write(net)
        sidecar.gate.set()
        taking.fence()
        assert not sidecar.sealed
        assert "was written to before the snapshot was sealed" in taking.stats.reason
        taking.snapshot(state, 2)
        taking.fence()
    assert list(sidecar.sealed) == [(2, 0)]
