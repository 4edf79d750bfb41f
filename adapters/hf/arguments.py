"""Holdfast's settings of a Trainer, as a dataclass that ``HfArgumentParser`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Optional

from holdfast.elastic import Batch, Checkpoints, Snapshots

_EXACT: Final[Mapping[str, bool | None]] = {"none": None, "true": True}
"""The settings that a command line names without being texts."""


@dataclass(frozen=True, kw_only=True)
class HoldfastArguments:
    """Settings beside those of ``TrainingArguments``; each field is an option of the command line.

    Wrong values raise ``ConfigError`` when training begins.
    """

    microbatches: int = field(
        default=0,
        metadata={
            "help": "Microbatches of a step, on any number of ranks; 0: gradient_accumulation_steps"
        },
    )
    exact: Optional[str] = field(  # noqa: UP045 - HfArgumentParser reads this spelling
        default=None,
        metadata={"help": "true, float32 or int64: weights do not depend on the number of ranks"},
    )
    rebuild_frozen: bool = field(
        default=False,
        metadata={"help": "Keep digests of frozen weights; every start builds them again"},
    )
    divide_evaluation: bool = field(
        default=True,
        metadata={"help": "Ranks divide the batches of an evaluation; otherwise each takes all"},
    )
    parity: int = field(default=1, metadata={"help": "Nodes that may be lost at the same time"})
    snapshot_every: int = field(default=1, metadata={"help": "Steps between snapshots"})
    checkpoint: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={"help": "Directory or s3://bucket/prefix from which a later start goes on"},
    )
    checkpoint_every: int = field(default=100, metadata={"help": "Steps between its checkpoints"})

    def settings(self, *, accumulation: int, size: int, seed: int) -> dict[str, Any]:
        """Return the arguments of `holdfast.resilient`.

        A step has ``accumulation`` microbatches of ``size`` samples, unless `microbatches` says
        another number.
        """
        checkpoint = (
            Checkpoints(self.checkpoint, every=self.checkpoint_every) if self.checkpoint else None
        )
        return {
            "batch": Batch(microbatches=self.microbatches or accumulation, size=size),
            "exact": _EXACT.get(str(self.exact).lower(), self.exact),
            "snapshots": Snapshots(parity=self.parity, every=self.snapshot_every),
            "checkpoint": checkpoint,
            "seed": seed,
            # The script builds the model before `train`, so a rehearsal would spare nothing.
            "rehearse": False,
        }
