"""A schedule that was not made for its run is refused, with what to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.pipelining import ScheduleGPipe

from elastic.data.loaders import Piece
from elastic.errors import ConfigError
from elastic.pipeline import Stage, pair, run_schedule


def schedule(microbatches: int, *, scaled: bool = False, staged: bool = True) -> ScheduleGPipe:
    made: Any = ScheduleGPipe.__new__(ScheduleGPipe)
    made._stage = Stage.__new__(Stage) if staged else object()
    made._n_microbatches, made.scale_grads = microbatches, scaled
    found: ScheduleGPipe = made
    return found


def pieces(*lengths: int, weight: float = 1.0) -> list[Piece]:
    def piece(number: int, length: int) -> Piece:
        batch = [torch.zeros(length), torch.zeros(length)]
        return Piece(microbatch=number, weight=weight, samples=1, fetch=lambda: batch)

    return [piece(number, length) for number, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("made", "work", "said"),
    [
        (schedule(2, staged=False), pieces(3, 3), "no stage made by run.stage"),
        (schedule(3), pieces(3, 3), "n_microbatches=run.share"),
        (schedule(2, scaled=True), pieces(3, 3), "scale_grads=False"),
        (schedule(2), pieces(3, 4), r"found \[\[3\], \[4\]\]"),
        (schedule(2), pieces(3, 3, weight=0.5), "that the microbatches divide"),
    ],
)
def test_what_does_not_fit_is_named(made: ScheduleGPipe, work: list[Piece], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_schedule(made, work, feed=pair, seed=0, step=0)
