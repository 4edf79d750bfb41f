"""The price of what a loop uses besides sums: each beside the same work without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.elastic.gradients.running_stats import RunningStats
from holdfast.elastic.gradients.users_hooks import UsersHooks
from holdfast.elastic.gradients.vanishing import GradientWatch
from holdfast.elastic.gradients.whole_tensors import whole_updates
from holdfast.elastic.groups.contents import BLOCK_BYTES, digest
from holdfast.tools.bench.exact.summands import SummingRanks, SummingSeat

WATCH: Final = "watch over 1,000 gradients, a microbatch"
NORM: Final = "BatchNorm, a forward"
COMPARISON: Final = "comparison of 8 MiB of state"
WHOLE: Final = "Muon on sharded matrices, a step"
_PARAMETERS: Final = 1000
_FORWARDS: Final = 20
_STATE_BYTES: Final = 8 << 20
_MATRICES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Seconds of some work with and without a part of Holdfast's, round by round."""

    with_s: list[float]
    without_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTask:
    """Find the prices of what needs one rank, or, with ``is_sharded``, all of them."""

    repeat: int
    width: int
    is_sharded: bool

    def run(self, seat: SummingSeat) -> dict[str, Price]:
        """Return the prices by name."""
        if self.is_sharded:
            return {WHOLE: _whole(self.repeat, self.width, seat)}
        return {
            WATCH: _watch(self.repeat),
            NORM: _norm(self.repeat),
            COMPARISON: _comparison(self.repeat),
        }


def _price(
    repeat: int, with_it: Callable[[], object], without: Callable[[], object], *, count: int = 1
) -> Price:
    """Time both in turn; the first round warms up. Each does the work ``count`` times."""
    price = Price(with_s=[], without_s=[])
    for number in range(repeat + 1):
        for work, found in ((with_it, price.with_s), (without, price.without_s)):
            started = time.perf_counter()
            work()
            if number:
                found.append((time.perf_counter() - started) / count)
    return price


def _watch(repeat: int) -> Price:
    weights = nn.ParameterList(nn.Parameter(torch.zeros(64)) for _ in range(_PARAMETERS))
    named = list(weights.named_parameters())
    watch, hooks = GradientWatch(lambda: named, moves=False, line=str), UsersHooks()
    watch.begin_pass()
    hooks.begin_pass(named)

    def plain() -> None:
        torch.cat(list(weights)).sum().backward()  # type: ignore[no-untyped-call]

    def watched() -> None:
        watch.saw_backward()  # of the plain one before
        watch.refuse_changes()
        hooks.begin_backward()
        plain()
        watch.saw_backward()
        watch.refuse_changes()

    return _price(repeat, watched, plain)


def _norm(repeat: int) -> Price:
    own, plain = nn.BatchNorm1d(64), nn.BatchNorm1d(64)
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    stats = RunningStats(SummingRanks())
    stats.learn([("norm", own)])

    def forwards(layer: nn.Module) -> None:
        stats.begin_pass()
        stats.begin_microbatch(0)
        for _ in range(_FORWARDS):
            layer(batch)

    price = _price(repeat, lambda: forwards(own), lambda: forwards(plain), count=_FORWARDS)
    stats.close()
    return price


def _comparison(repeat: int) -> Price:
    state = torch.zeros(_STATE_BYTES // 4)
    copy, blocks = torch.empty_like(state), range(_STATE_BYTES // BLOCK_BYTES)
    return _price(repeat, lambda: digest(state, blocks), lambda: copy.copy_(state))


def _whole(repeat: int, width: int, seat: SummingSeat) -> Price:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_MATRICES)))
    fully_shard(model, mesh=init_device_mesh("cpu", (seat.world_size,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-3)

    def give() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    def by_shards() -> Any:
        give()
        optimizer.step()  # type: ignore[no-untyped-call]

    def by_wholes() -> Any:
        give()
        with whole_updates([optimizer], exact="float32"):
            optimizer.step()  # type: ignore[no-untyped-call]

    return _price(repeat, by_wholes, by_shards)
