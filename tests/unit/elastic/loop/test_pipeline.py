"""Stages and schedules that do not match each other or their run are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from holdfast.elastic.data.loaders import LoadedMicrobatch
from holdfast.elastic.errors import ConfigError, GenerationOverError
from holdfast.elastic.loop.pipeline import Stage, pair, run_schedule, stages_of
from holdfast.elastic.randomness import Draws


class OneRank:
    """A world of this process alone, in which others may have other numbers of stages."""

    def __init__(self, mesh: DeviceMesh, counts: list[int] | None = None) -> None:
        self.mesh, self._counts = mesh, counts

    def gather(self, value: int) -> list[int]:
        return self._counts or [value]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "pp"))
    dist.destroy_process_group()


def staged(modules: list[nn.Module], world: Any, *, exact: bool = True, even: bool = True) -> Any:
    return stages_of(
        modules,
        world,
        check=lambda: None,
        enter=lambda _: None,
        exact=exact,
        shares_are_even=even,
    )


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(3, 3) for _ in range(count)]


def schedule(microbatches: int, *, scaled: bool = False, staged: bool = True) -> ScheduleGPipe:
    made: Any = ScheduleGPipe.__new__(ScheduleGPipe)
    made._stage = Stage.__new__(Stage) if staged else object()
    made._n_microbatches, made.scale_grads = microbatches, scaled
    found: ScheduleGPipe = made
    return found


def pieces(*lengths: int, weight: float = 1.0, width: int | None = None) -> list[LoadedMicrobatch]:
    def piece(number: int, length: int) -> LoadedMicrobatch:
        shape = (length,) if width is None else (length, width)
        batch = [torch.ones(shape) * number, torch.zeros(shape)]
        return LoadedMicrobatch(microbatch=number, weight=weight, samples=1, fetch=lambda: batch)

    return [piece(number, length) for number, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("made", "work", "said"),
    [
        (schedule(2, staged=False), pieces(3, 3), "not made by run.stage"),
        (schedule(3), pieces(3, 3), "n_microbatches=run.share"),
        (schedule(2, scaled=True), pieces(3, 3), "scale_grads=False"),
        (schedule(2), pieces(3, 4), r"found \[\[3\], \[4\]\]"),
        (schedule(2), pieces(3, 3, weight=0.5), "that the microbatches divide"),
    ],
)
def test_what_does_not_fit_is_named(
    made: ScheduleGPipe, work: list[LoadedMicrobatch], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run_schedule(made, work, feed=pair, draws=Draws(seed=0, step=0))


def test_several_stages_of_one_rank_are_one_model_after_the_other(mesh: DeviceMesh) -> None:
    modules = linears(3)
    stages = staged(modules, OneRank(mesh))
    assert [(stage.stage_index, stage.num_stages) for stage in stages] == [(0, 3), (1, 3), (2, 3)]
    looped = ScheduleLoopedBFS(
        stages, n_microbatches=2, loss_fn=nn.functional.mse_loss, scale_grads=False
    )
    work = pieces(4, 4, width=3)
    losses = run_schedule(looped, work, feed=pair, draws=Draws(seed=0, step=0))
    found = [parameter.grad for module in modules for parameter in module.parameters()]
    whole = nn.Sequential(*modules)
    whole.zero_grad()
    wanted = []
    for piece in work:
        x, y = piece.fetch()
        loss = nn.functional.mse_loss(whole(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        wanted.append(float(loss.detach()))
    assert losses == wanted
    for gradient, parameter in zip(found, whole.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_stages_tell_which_microbatch_comes_before_its_forward_and_its_backward(
    mesh: DeviceMesh,
) -> None:
    entered: list[int] = []
    stages = stages_of(
        linears(1),
        OneRank(mesh),
        check=lambda: None,
        enter=entered.append,
        exact=True,
        shares_are_even=True,
    )
    schedule = ScheduleGPipe(
        stages[0], n_microbatches=2, loss_fn=nn.functional.mse_loss, scale_grads=False
    )
    work = pieces(4, 4, width=3)
    run_schedule(schedule, work, feed=pair, draws=Draws(seed=0, step=0))
    numbers = [piece.microbatch for piece in work]
    assert entered == numbers * 2


def test_ranks_with_other_numbers_of_stages_are_told_so(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match=r"the ranks have \[2, 1\] stages"):
        staged(linears(2), OneRank(mesh, [2, 1]))
    with pytest.raises(ConfigError, match=r"the ranks have \[0\] stages"):
        staged([], OneRank(mesh))


def test_a_mesh_without_an_axis_of_stages_is_named(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match=r"give Mesh\(pp=2\)"):
        staged(linears(1), OneRank(mesh["dp"]))


def test_modules_that_reduce_unseen_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match="in DistributedDataParallel would be averaged"):
        staged([DistributedDataParallel(nn.Linear(2, 2))], OneRank(mesh))
    inner = nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=mesh["dp"]))
    with pytest.raises(ConfigError, match="call fully_shard on the stage's module as well"):
        staged([inner], OneRank(mesh))


def test_many_sharded_stages_want_even_shares(mesh: DeviceMesh) -> None:
    sharded: list[nn.Module] = [fully_shard(each, mesh=mesh["dp"]) for each in linears(4)]
    with pytest.raises(ConfigError, match="4 FSDP2 stages of one rank"):
        staged(sharded, OneRank(mesh), even=False)
    assert len(staged(sharded, OneRank(mesh))) == 4
    assert len(staged(sharded[:3], OneRank(mesh), even=False)) == 3


def test_a_schedule_that_hides_gradients_from_exact_mode_is_refused(mesh: DeviceMesh) -> None:
    for exact in (True, False):
        stages = staged(linears(2), OneRank(mesh), exact=exact)
        split = ScheduleInterleavedZeroBubble(
            stages, n_microbatches=2, loss_fn=nn.functional.mse_loss, scale_grads=False
        )
        work = pieces(4, 4, width=3)
        if exact:
            with pytest.raises(ConfigError, match="zero bubble"):
                run_schedule(split, work, feed=pair, draws=Draws(seed=0, step=0))
        else:
            assert len(run_schedule(split, work, feed=pair, draws=Draws(seed=0, step=0))) == 2


@pytest.mark.parametrize(("error", "is_logged"), [(GenerationOverError, False), (ValueError, True)])
def test_the_end_of_a_generation_is_no_error_of_its_schedule(
    error: type[Exception], is_logged: bool, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    def over() -> None:
        raise error("over")

    stages = stages_of(
        linears(2),
        OneRank(mesh),
        check=over,
        enter=lambda _: None,
        exact=True,
        shares_are_even=True,
    )
    looped = ScheduleLoopedBFS(
        stages, n_microbatches=2, loss_fn=nn.functional.mse_loss, scale_grads=False
    )
    with pytest.raises(error, match="over"):
        run_schedule(looped, pieces(4, 4, width=3), feed=pair, draws=Draws(seed=0, step=0))
    assert ("caught exception" in caplog.text) == is_logged


def test_a_schedule_with_other_places_for_the_stages_is_refused(mesh: DeviceMesh) -> None:
    stages = staged(linears(2), OneRank(mesh), exact=False)
    bent: Any = ScheduleZBVZeroBubble(
        stages, n_microbatches=2, loss_fn=nn.functional.mse_loss, scale_grads=False
    )
    bent.pp_group_size, bent.stage_index_to_group_rank = 2, {0: 0, 1: 1, 2: 1, 3: 0}
    with pytest.raises(ConfigError, match="other stages than every pp-th"):
        run_schedule(bent, pieces(4, 4, width=3), feed=pair, draws=Draws(seed=0, step=0))
