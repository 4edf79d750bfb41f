"""torch's norm of gradients is the run's, or it is refused with the line of the script."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_run import lone_run
from torch import nn
from torch.distributed.fsdp import fully_shard
from updated import DATA, one_pass

from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.run import Run
from holdfast.elastic.loop.updates.interposed import Interposed
from holdfast.elastic.loop.updates.norms import refuse_partial_norms

HERE = rf"{Path(__file__).name}:\d+"


def clip(parameters: Iterable[nn.Parameter]) -> Any:
    return nn.utils.clip_grad_norm_(parameters, 0.1)


def norm_of(parameters: Iterable[nn.Parameter]) -> Any:
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def normed(run: Run, take: Callable[[Iterable[nn.Parameter]], Any], *, sharded: bool) -> float:
    """Train a step; return the norm that ``take`` returns in it."""
    net: nn.Module = nn.Linear(4, 4)
    if sharded:
        net = fully_shard(net, mesh=run.mesh["dp"])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run.track(net=net, optimizer=optimizer)
    norm = float("nan")
    for _ in run.steps(1):
        one_pass(run, net)
        norm = float(take(net.parameters()))
        run.step(optimizer)
    return norm


@pytest.mark.parametrize("take", [clip, norm_of])
def test_the_norm_of_shards_is_refused_where_bits_count(tmp_path: Path, take: Any) -> None:
    words = rf"norm of gradients at {HERE}: .* call run\.clip_grad_norm_\(parameters, max_norm\)"
    with lone_run(tmp_path) as run, pytest.raises(ConfigError, match=words):
        normed(run, take, sharded=True)


@pytest.mark.parametrize("take", [clip, norm_of])
@pytest.mark.parametrize(("exact", "sharded"), [("float32", False), (None, True), (None, False)])
def test_elsewhere_it_is_torchs_own(tmp_path: Path, take: Any, exact: Exact, sharded: bool) -> None:
    with lone_run(tmp_path, exact=exact) as run:
        assert normed(run, take, sharded=sharded) > 0
    assert norm_of(nn.Linear(2, 2).parameters()) == 0


def test_a_stage_is_not_clipped_by_its_own_norm() -> None:
    net = nn.Linear(4, 4)
    net(DATA).sum().backward()
    interposed = Interposed()
    refuse_partial_norms(interposed, stages=2, exact=None)
    try:
        with pytest.raises(
            ConfigError, match=rf"at {HERE} knows this rank's pipeline stages alone"
        ):
            clip(net.parameters())
        assert norm_of(net.parameters()) > 0, "to be added up over the stages by hand"
    finally:
        interposed.close()
    assert clip(net.parameters()) > 0
