"""A step's microbatches through the stages of a pipeline, each with its own randomness.

The schedules are those of ``torch.distributed.pipelining``; what they call a microbatch is one of
ours. The schedule is told how many a step has for this group of ranks, and a stage seeds each of
them before its forward pass, so that neither the order nor the group shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from elastic import randomness
from elastic.data.loaders import Piece
from elastic.errors import ConfigError
from elastic.seeding import seed_all

AXIS = "pp"

Feed = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
"""Takes a microbatch apart: the input of the first stage, and the target of the loss."""


class Stage(PipelineStage):
    """This rank's stage; ``seeds`` are those of the microbatches to come, in their order."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, *, check: Callable[[], None]) -> None:
        axis = mesh[AXIS]
        super().__init__(
            module,
            axis.get_local_rank(),
            axis.size(),
            torch.device("cpu"),
            group=axis.get_group(),
        )
        self.seeds: Sequence[int] = ()
        self._check = check

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one microbatch under its own seed; raise ``Fenced`` when the generation is over."""
        self._check()
        seed_all(self.seeds[fwd_chunk_id])
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


def pair(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two parts of a batch that is input and target."""
    inputs, target = batch
    return inputs, target


def run_schedule(
    schedule: PipelineScheduleSingle, pieces: Sequence[Piece], *, feed: Feed, seed: int, step: int
) -> list[float]:
    """Run microbatches forward and backward; return their losses, zeros before the last stage.

    Raises ``ConfigError`` where the schedule is not made for them.
    """
    stage = _stage_of(schedule, len(pieces))
    fed = [feed(piece.fetch()) for piece in pieces]
    if len({x.shape for x, _ in fed}) > 1 or any(piece.weight != 1.0 for piece in pieces):
        raise ConfigError(
            f"run.pipeline needs microbatches of one shape, found {[list(x.shape) for x, _ in fed]}"
            ": give a batch that the microbatches divide, and samples of one length"
        )
    numbers = [piece.microbatch for piece in pieces]
    stage.seeds = [_seed(seed, step, number, stage=stage.stage_index) for number in numbers]
    losses: list[torch.Tensor] = []
    inputs = [torch.cat([x for x, _ in fed])] if stage.is_first else []
    target = torch.cat([y for _, y in fed]) if stage.is_last else None
    schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
    return [float(loss.detach()) for loss in losses] or [0.0] * len(pieces)


def _seed(seed: int, step: int, microbatch: int, *, stage: int) -> int:
    """Return the seed of a microbatch at a stage; at the first the same as without a pipeline."""
    if stage == 0:
        return randomness.microbatch_seed(seed, step=step, microbatch=microbatch)
    return randomness.stream_seed(seed, "stage", step, microbatch, stage)


def _stage_of(schedule: PipelineScheduleSingle, microbatches: int) -> Stage:
    stage = getattr(schedule, "_stage", None)
    if not isinstance(stage, Stage):
        raise ConfigError(
            f"run.pipeline: {type(schedule).__name__} has no stage made by run.stage(module): give "
            "a schedule of one stage per rank (as Schedule1F1B) with that"
        )
    found = schedule._n_microbatches
    if found != microbatches:
        raise ConfigError(
            f"run.pipeline: the schedule has {found} microbatches, this group's share of a step is "
            f"{microbatches}: build it with n_microbatches=run.share"
        )
    if schedule.scale_grads:
        raise ConfigError(
            "run.pipeline: the schedule scales gradients by its own microbatches, the mean is over "
            "those of all groups: build it with scale_grads=False"
        )
    return stage
