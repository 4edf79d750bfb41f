"""Buffers are equal on all replicas after a pass, by the rule of their kind, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm as older_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients import replays
from holdfast.elastic.gradients.buffers import PassBuffers


class ReducingRank:
    """One of two ranks; ``other`` changes a reduced tensor as the other rank would."""

    size = 2

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.other: list[Callable[[torch.Tensor], None]] = []
        self.reduced: list[torch.Tensor] = []

    def _reduce(self, tensor: torch.Tensor) -> None:
        if self.other:
            self.other.pop(0)(tensor)
        self.reduced.append(tensor.clone())

    max_ = sum_ = _reduce

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        raise NotImplementedError


class Counting(nn.Module):
    """Counts its calls, with a cache beside."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self) -> None:
        self.calls = self.calls + 1
        self.cache.add_(1)


def one_pass(
    model: nn.Module, rank: ReducingRank, body: Callable[[], Any], *, exact: Exact = None
) -> PassBuffers:
    buffers = PassBuffers({"model": model}, rank, microbatches=4, exact=exact)
    buffers.begin_pass()
    for number in range(4):
        buffers.begin_microbatch(number)
        body()
    buffers.end_pass()
    return buffers


def test_modules_without_buffers_need_no_collective() -> None:
    rank, model = ReducingRank(), nn.Linear(2, 2)
    one_pass(model, rank, lambda: model(torch.ones(1, 2)))
    assert not rank.reduced


def test_a_buffer_that_did_not_change_is_not_sent() -> None:
    rank, model = ReducingRank(), Counting()
    one_pass(model, rank, lambda: None, exact="float32")
    assert len(rank.reduced) == 1


def test_a_changed_buffer_becomes_that_of_the_lowest_rank_that_changed_it() -> None:
    model, rank = Counting(), ReducingRank(index=1)

    def changed_too(vector: torch.Tensor) -> None:
        vector[0] = 2.0  # rank 0 of 2

    def is_seven(raw: torch.Tensor) -> None:
        assert not raw.any(), "this rank sends nothing"
        raw.copy_(torch.tensor(7).reshape(1).view(torch.uint8))

    rank.other = [changed_too, is_seven]
    one_pass(model, rank, model)
    assert model.calls.item() == 7
    rank.other = []
    one_pass(model, rank, model)
    assert model.calls.item() == 11, "of this rank, which alone changed it"
    assert model.cache.item() == 8


def test_with_exact_a_changed_buffer_is_named() -> None:
    model = nn.Sequential(nn.Linear(1, 1), Counting())
    with pytest.raises(ConfigError, match=r"buffer model\.1\.calls \(of a Counting\)"):
        one_pass(model, ReducingRank(), model[1], exact="int64")


def test_with_exact_a_buffer_that_changed_on_another_rank_is_named_here_too() -> None:
    model, rank = Counting(), ReducingRank()

    def changed(vector: torch.Tensor) -> None:
        vector[0] = 1.0

    rank.other = [changed]
    with pytest.raises(ConfigError, match=r"model\.calls"):
        one_pass(model, rank, lambda: None, exact="float32")


def test_buffers_of_unequal_sizes_are_named() -> None:
    model, rank = Counting(), ReducingRank()

    def larger(vector: torch.Tensor) -> None:
        vector[1] = 16.0

    rank.other = [larger]
    with pytest.raises(ConfigError, match=r"model\.calls has 16 bytes on one rank and 8"):
        one_pass(model, rank, model)


@pytest.mark.parametrize("make", [spectral_norm, older_spectral_norm])
def test_a_pass_leaves_one_power_iteration_of_a_spectral_norm(
    make: Callable[[nn.Module], nn.Module],
) -> None:
    torch.manual_seed(0)
    model, x = make(nn.Linear(4, 3)), torch.ones(2, 4)
    torch.manual_seed(0)
    plain = make(nn.Linear(4, 3))
    plain(x)
    found: list[torch.Tensor] = []
    rank = ReducingRank()
    one_pass(model, rank, lambda: found.append(model(x)), exact="float32")
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer)
    assert all(torch.equal(each, found[0]) for each in found)
    assert len(rank.reduced) == 2, "a rank that did not run the layer gets the update too"
    model(x)  # outside of microbatches it is torch's own
    plain(x)
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), plain.buffers(), strict=True))
    assert torch.equal(model.eval()(x), plain.eval()(x))


REPLAY = methodcaller("replay")  # found at the call, as graphed callables find it


class Stamped(nn.Module):
    """A norm layer, a counter and a constant, all of them buffers that are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(3))


@pytest.fixture
def graph_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], Any]:
    """Return a class that stands for torch's graphs.

    Its replays write to a tensor, and no version counter moves.
    """

    class Graph:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def replay(self) -> None:
            self.tensor.data.add_(1)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return Graph


def test_a_buffer_that_a_replayed_graph_changed_is_spread_or_refused(
    graph_of: Callable[[torch.Tensor], Any],
) -> None:
    rank, model = ReducingRank(), Stamped()
    graph, norm = graph_of(model.calls), graph_of(model.norm.running_mean)
    one_pass(model, rank, partial(REPLAY, graph)).close()
    assert model.calls.item() == 4
    owners = dict(zip(dict(model.named_buffers()), rank.reduced[0][-15:-10].tolist(), strict=True))
    assert {name for name, owner in owners.items() if owner} == {"calls"}

    with pytest.raises(ConfigError, match=r"changed the buffer model\.calls"):
        one_pass(model, ReducingRank(), partial(REPLAY, graph), exact="float32")
    with pytest.raises(ConfigError, match=r"running_mean .* capture no CUDA graph of it"):
        one_pass(model, ReducingRank(), partial(REPLAY, norm), exact="float32")
    one_pass(model, ReducingRank(), lambda: None, exact="float32").close()


def test_torch_has_its_own_method_again_after_the_last_watch(
    graph_of: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "_watches", WeakSet())
    kind: Any = torch.cuda.CUDAGraph
    own, seen = kind.replay, list[str]()
    watches = [replays.ReplayWatch(lambda name=name: seen.append(name)) for name in "ab"]
    graph = graph_of(torch.zeros(1))
    graph.replay()
    watches[0].begin()
    graph.replay()
    graph.replay()
    watches[1].begin()
    watches[1].end()
    graph.replay()
    assert seen == ["a"]
    assert graph.tensor.item() == 4
    for watch in watches:
        assert kind.replay is not own
        watch.close()
    assert kind.replay is own
