"""Pipeline stages: run a step's microbatches through them, each with its own randomness.

The schedules are those of ``torch.distributed.pipelining``; their microbatches are Holdfast's. A
schedule is built for this group's number of microbatches in a step. A stage seeds each microbatch
before its forward pass, so that the result depends neither on the order nor on the group. A rank
with several stages has every ``pp``-th of them (Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters", and Lamy-Poirier, "Breadth-First Pipeline Parallelism").
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from holdfast.ckpt import torch_private
from holdfast.elastic.data.loaders import LoadedMicrobatch
from holdfast.elastic.errors import ConfigError, GenerationOverError
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.randomness import Draws
from holdfast.elastic.seeding import seed_all

AXIS: Final = "pp"

_WHOLE_STAGES: Final = 3
"""The number of a rank's stages that a schedule keeps gathered. Of more stages it gathers some
again, in an order that depends on the number of microbatches."""

Feed = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
"""Splits a microbatch into the input of the first stage and the target of the loss."""

Schedule: TypeAlias = PipelineScheduleSingle | PipelineScheduleMulti
"""Schedule of ``torch.distributed.pipelining``, for one stage per rank or for several."""


def _is_no_fence(_: logging.LogRecord) -> bool:
    return not isinstance(sys.exc_info()[1], GenerationOverError)


# If a generation ends during a schedule, torch would log an error and the whole plan.
schedules.logger.addFilter(_is_no_fence)


class Stage(PipelineStage):
    """Stage ``index`` of ``count``.

    ``seeds`` and ``numbers`` are those of the coming microbatches, in order. ``enter`` is called
    with the number of the microbatch whose forward or backward comes next.

    Raises ``ConfigError`` for a module that would sum its gradients by itself.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: DeviceMesh,
        *,
        index: int,
        count: int,
        check: Callable[[], None],
        enter: Callable[[int], None],
        exact: bool,
    ) -> None:
        _refuse(module)
        super().__init__(module, index, count, torch.device("cpu"), group=axis.get_group())
        self.seeds: Sequence[int] = ()
        self.numbers: Sequence[int] = ()
        self._check, self._enter, self._exact = check, enter, exact

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one microbatch under its own seed.

        Raises ``GenerationOverError`` if the generation is over.
        """
        self._check()
        self._enter(self.numbers[fwd_chunk_id])
        seed_all(self.seeds[fwd_chunk_id])
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the backward of one microbatch; activation checkpointing runs forwards in it."""
        self._enter(self.numbers[bwd_chunk_id])
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of the weights separately from those of the input.

        Raises ``ConfigError`` in exact mode: these gradients bypass the hooks that round them.
        """
        if self._exact:
            raise ConfigError(
                "exact: this schedule makes the gradients of weights apart (zero bubble), where "
                "they cannot be rounded: take Schedule1F1B, ScheduleInterleaved1F1B, "
                "ScheduleLoopedBFS or ScheduleGPipe, or set exact=None"
            )
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def _refuse(module: nn.Module) -> None:
    if isinstance(module, DistributedDataParallel):
        raise ConfigError(
            "run.stages: a stage in DistributedDataParallel would be averaged by it: give the "
            "module itself, its gradients are summed over the data-parallel groups"
        )
    if not isinstance(module, FSDPModule) and any(
        isinstance(part, FSDPModule) for part in module.modules()
    ):
        raise ConfigError(
            "run.stages: fully_shard is applied inside a stage and not to the stage, which its "
            "schedule would not notice: call fully_shard on the stage's module as well"
        )


def stages_of(
    modules: Sequence[nn.Module],
    world: GenerationWorld,
    *,
    check: Callable[[], None],
    enter: Callable[[int], None],
    exact: bool,
    shares_are_even: bool,
) -> list[Stage]:
    """Return the stages of this rank, which are every ``pp``-th of all stages; collective.

    Raises ``ConfigError`` if a rank has another number of stages, if the mesh has no axis ``pp``,
    and for modules that cannot be stages.
    """
    counts = world.gather(len(modules))
    if not modules or any(count != len(modules) for count in counts):
        raise ConfigError(
            f"run.stages: the ranks have {counts} stages: give every rank equally many, one or "
            "more (of a number of stages that pp divides)"
        )
    if AXIS not in (world.mesh.mesh_dim_names or ()):
        raise ConfigError(
            "run.stages needs an axis of stages: give Mesh(pp=2), or several sizes as in "
            "Mesh(pp=(2, 1))"
        )
    gathered = sum(isinstance(module, FSDPModule) for module in modules)
    if gathered > _WHOLE_STAGES and not shares_are_even:
        raise ConfigError(
            f"run.stages: {gathered} FSDP2 stages of one rank are gathered in an order that "
            "follows the number of microbatches, which differs between the data-parallel groups: "
            f"have {_WHOLE_STAGES} stages per rank at most, or even shares (microbatches that the "
            "groups divide, Batch(by_speed=False))"
        )
    axis = world.mesh[AXIS]
    rank, size = axis.get_local_rank(), axis.size()
    count = len(modules) * size
    return [
        Stage(
            module,
            axis,
            index=rank + at * size,
            count=count,
            check=check,
            enter=enter,
            exact=exact,
        )
        for at, module in enumerate(modules)
    ]


def pair(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input and the target of a batch that is such a pair."""
    inputs, target = batch
    return inputs, target


def run_schedule(
    schedule: Schedule, pieces: Sequence[LoadedMicrobatch], *, feed: Feed, draws: Draws
) -> list[float]:
    """Run microbatches forward and backward; return their losses, zeros without the last stage.

    Raises ``ConfigError`` if the schedule is not built for them.
    """
    stages = _stages_in(schedule, len(pieces))
    fed = [feed(piece.fetch()) for piece in pieces]
    if len({x.shape for x, _ in fed}) > 1 or any(piece.weight != 1.0 for piece in pieces):
        raise ConfigError(
            f"run.pipeline needs microbatches of one shape, found {[list(x.shape) for x, _ in fed]}"
            ": give a batch that the microbatches divide, and samples of one length"
        )
    numbers = [piece.microbatch for piece in pieces]
    for stage in stages:
        stage.numbers = numbers
        stage.seeds = [draws.stage(number, stage=stage.stage_index) for number in numbers]
    losses: list[torch.Tensor] = []
    inputs = [torch.cat([x for x, _ in fed])] if any(stage.is_first for stage in stages) else []
    target = torch.cat([y for _, y in fed]) if any(stage.is_last for stage in stages) else None
    schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
    return [float(loss.detach()) for loss in losses] or [0.0] * len(pieces)


def _stages_in(schedule: Schedule, microbatches: int) -> list[Stage]:
    name = type(schedule).__name__
    found = torch_private.stages_of(schedule)
    stages = [stage for stage in found if isinstance(stage, Stage)]
    if len(stages) < len(found):
        raise ConfigError(
            f"run.pipeline: {name} has stages that were not made by run.stage(module) or "
            "run.stages(modules): give it those"
        )
    if isinstance(schedule, PipelineScheduleMulti) and any(
        rank != stage % schedule.pp_group_size
        for stage, rank in schedule.stage_index_to_group_rank.items()
    ):
        raise ConfigError(
            f"run.pipeline: {name} wants a rank to have other stages than every pp-th of them: "
            "take ScheduleInterleaved1F1B or ScheduleLoopedBFS"
        )
    if (made_for := torch_private.microbatches_of(schedule)) != microbatches:
        raise ConfigError(
            f"run.pipeline: the schedule has {made_for} microbatches, this group's "
            f"share of a step is {microbatches}: build it with n_microbatches=run.share"
        )
    if schedule.scale_grads:
        raise ConfigError(
            "run.pipeline: the schedule scales gradients by its own microbatches, the mean is over "
            "those of all groups: build it with scale_grads=False"
        )
    return stages
