"""Settings and records of a traced run: one JSON line each, complete when it is visible. Pure."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.ckpt.types import Json, learn

TRACE_ENV: Final = "HOLDFAST_TRACE"
"""Environment variable that makes runs record themselves (JSON of `TraceSettings`)."""

TRACES: Final = "*.trace"
"""Pattern of the files of records: one per function, generation, rank and process."""

FIRST: Final = "before the first microbatch"
BETWEEN: Final = "between two microbatches"
PASSED: Final = "after the pass"
STEPPED: Final = "after run.step"
KEPT: Final = "after the snapshot"

Use: TypeAlias = Literal[
    "loader",
    "generator",
    "numpy generator",
    "python generator",
    "rank",
    "clock",
    "environment",
    "zero_grad",
    "optimizer by hand",
    "untracked optimizer",
    "untracked scheduler",
    "carried",
]
"""Kinds of things that a script uses and that are not the run's."""


class PlannedDeath(msgspec.Struct, frozen=True, kw_only=True):
    """A death by SIGKILL of the first or the last rank, once, where a step comes to a point.

    ``stage`` is the user's function; empty: any.
    """

    number: int
    step: int
    point: str
    phase: int = 0
    who: Literal["first", "last"] = "first"
    stage: str = ""


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The order to trace: the folder, the steps to make, and what shall happen on the way.

    ``uneven``: the first rank takes as many microbatches as it can. ``hold``: rank 0 stops before
    this step and makes the file ``held``. A step with a death waits for ``ranks`` ranks, so that
    each death is followed by a restore at fewer ranks and one at all. ``roots`` is the folder of
    the roots of checkpoints that stand for the script's own; empty: its own are used.
    """

    folder: str
    steps: int
    uneven: bool = False
    deaths: tuple[PlannedDeath, ...] = ()
    ranks: int = 1
    hold: int = -1
    roots: str = ""


class TraceRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="is"):
    """A line of a trace."""


class LoopEntered(TraceRecord, frozen=True, kw_only=True, tag="entered"):
    """A rank has come to its first step in a generation; the first line of every file.

    ``stage`` is the user's function. ``per_rank``: it tracks state that each rank has for itself.
    """

    stage: str
    generation: int
    rank: int
    world: int
    pid: int
    completed: int
    exact: Json
    microbatches: int
    share: int
    per_rank: bool = False


class LeafDigest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor or a plain value of the tracked state.

    ``own`` is the kind of what a rank has for itself, in a `PerRank`. ``shown`` is the value of a
    number or a short text. ``norm`` is a tensor's 2-norm, ``mark`` a projection that tells tensors
    of equal norm apart.
    """

    kind: Literal["parameter", "buffer", "shard", "value", "own"]
    digest: str
    shown: str = ""
    norm: float = 0.0
    mark: float = 0.0


class StateSeen(TraceRecord, frozen=True, kw_only=True, tag="state"):
    """The tracked state before a generation's first step, or after a step.

    ``updates`` counts the steps of tracked optimizers in that step.
    """

    step: int
    after: bool
    leaves: dict[str, LeafDigest]
    updates: int = 0


class CarriedSeen(TraceRecord, frozen=True, kw_only=True, tag="carried"):
    """The values, as text, of the script's variables that the step about to begin reads."""

    step: int
    values: dict[str, str]


class MicrobatchSeen(TraceRecord, frozen=True, kw_only=True, tag="microbatch"):
    """One microbatch: digests of its input, the draws up to its end, its loss, its gradients.

    ``phase`` counts the calls of run.step before it in the step, ``round`` the passes before it in
    the phase.
    """

    step: int
    phase: int
    round: int
    microbatch: int
    input: str
    draws: dict[str, str]
    line: str
    loss: str = ""
    value: float | None = None
    gradients: dict[str, str] = {}


class ForeignUse(TraceRecord, frozen=True, kw_only=True, tag="use"):
    """A line of the script uses something that is not the run's.

    ``place`` is ``build``, ``step`` or ``microbatch``.
    """

    use: Use
    line: str
    detail: str
    place: str
    step: int
    microbatch: int = -1


class LoopLeft(TraceRecord, frozen=True, kw_only=True, tag="left"):
    """A rank has left the loop in a step, with so many steps complete: ``end`` or ``early``."""

    step: int
    how: Literal["end", "early"]


Traced: TypeAlias = LoopEntered | StateSeen | CarriedSeen | MicrobatchSeen | ForeignUse | LoopLeft


learn(globals())
