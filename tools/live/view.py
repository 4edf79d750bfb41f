"""The state of a run as a value, which a page, a terminal or an exporter shows. Pure.

Times are in seconds since 1970, durations in seconds, sizes in bytes. A value that is not known is
None. Lists are bounded: the newest entries stay, and counts beside them are exact.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

NodeState: TypeAlias = Literal["training", "restoring", "spare", "held off", "lost", "left", "idle"]
"""``spare`` is alive and without a rank, ``held off`` is not admitted yet since it was lost before.

``idle`` runs no trainer, ``left`` went after a notice, ``restoring`` has a rank of the newest
generation and no state yet.
"""

JobState: TypeAlias = Literal["starting", "training", "recovering", "done", "failed", "silent"]
"""``silent`` is a job that did not end, and whose nodes and launcher say nothing any more."""

Source: TypeAlias = Literal["events", "coordinator", "both"]
"""``coordinator``: no run directory is read, so there is no past, and nothing has its time."""

Level: TypeAlias = Literal["routine", "good", "note", "warn", "bad"]
"""``routine`` comes again and again while all is well, as with every checkpoint."""


class SeatView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker of a node. ``step`` is its newest, ``rank`` that in the newest generation."""

    seat: str
    role: str
    pid: int
    attempt: int
    alive: bool
    rank: int | None = None
    step: int | None = None
    straggles: str = ""
    tokens: int | None = None
    samples: int | None = None
    version: int | None = None


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node: its state, the reason, its workers, and its sidecar's answer where there is one.

    ``losses`` counts how often it was lost. ``slots``, ``parity``, ``logs``, ``budget``, ``need``
    and ``disk`` are bytes.
    """

    node: str
    state: NodeState
    why: str = ""
    since_s: float | None = None
    seats: tuple[SeatView, ...] = ()
    losses: int = 0
    troubles: tuple[str, ...] = ()
    answered: bool = False
    generation: int | None = None
    committed: int | None = None
    protected: int | None = None
    durable: int | None = None
    age_s: float | None = None
    slots_bytes: int = 0
    parity_bytes: int = 0
    logs_bytes: int = 0
    disk_bytes: int = 0
    budget_bytes: int = 0
    need_bytes: int = 0
    mode: str = ""


class RecoveryView(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that followed a loss or a join: cause, cost by phase, and the reason.

    ``cause`` is ``loss``, ``join``, ``rollback`` or ``start``. A phase is None where it is not over
    or cannot be told: ``detect_s`` is known only of faults that were injected. ``total_s`` goes
    from the loss to the moment when training stands where it stood, ``steps_lost`` are executed
    again. ``dated`` is False if it was there before the reader, so that ``at_s`` is too late.
    """

    generation: int
    cause: str
    victims: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    at_s: float
    proposed_s: float
    ranks: int
    restore_step: int | None = None
    restore_how: str = ""
    tier: str = ""
    restored_bytes: int = 0
    detect_s: float | None = None
    agree_s: float | None = None
    reform_s: float | None = None
    restore_s: float | None = None
    reexecute_s: float | None = None
    total_s: float | None = None
    steps_lost: int = 0
    over: bool = False
    reason: str = ""
    dated: bool = True


class FaultView(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that was injected or a loss that was noticed."""

    at_s: float
    what: str
    victim: str
    node: str
    injected: bool
    why: str = ""


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint by its events.

    ``state`` is ``writing``, ``durable``, ``failed`` or ``skipped``.
    """

    step: int
    state: str
    at_s: float
    size_bytes: int | None = None
    seconds: float | None = None
    bytes_per_s: int | None = None
    done: float | None = None
    retries: int = 0
    why: str = ""


class CheckpointsView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoints, and exact counts of all."""

    newest: tuple[CheckpointView, ...] = ()
    durable_step: int | None = None
    durable_s: float | None = None
    done: int = 0
    failed: int = 0
    skipped: int = 0
    in_a_row: int = 0


class ProtectionView(msgspec.Struct, frozen=True, kw_only=True):
    """The protection as it is now.

    ``step`` survives the loss of ``parity`` nodes of each group. ``at_risk_steps`` and
    ``at_risk_s`` are the work that such a loss would cost. ``told_by`` is ``nodes`` if sidecars
    said it, else ``events``. ``protect_median_s`` is the time from the end of a step to its
    protection.
    """

    step: int | None = None
    age_s: float | None = None
    at_risk_steps: int | None = None
    at_risk_s: float | None = None
    told_by: str = "events"
    protect_median_s: float | None = None
    protect_max_s: float | None = None
    why_not: str = ""
    slots_bytes: int = 0
    parity_bytes: int = 0
    logs_bytes: int = 0
    disk_bytes: int = 0
    budget_bytes: int = 0


class StragglerView(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that holds, or held, the others up. ``over_s`` is None while it does."""

    seat: str
    node: str
    at_s: float
    times: float
    why: str
    over_s: float | None = None


class RunMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A line for people; ``reason`` is the planner's, in its own words."""

    at_s: float
    level: Level
    node: str
    text: str
    reason: str = ""


class RolloutsView(msgspec.Struct, frozen=True, kw_only=True):
    """Reinforcement learning: samples, waiting, staleness, and refusals.

    ``staleness`` is the trainers' step less the oldest policy version of a living worker,
    ``staleness_most`` the greatest of a sample that was trained on. ``pending`` to ``awaited`` are
    prompts by their state in the ledger, None before it told. ``reward`` is the newest mean.
    """

    workers: int = 0
    sampling: int = 0
    samples_under_way: int = 0
    tokens: int = 0
    tokens_per_s: float | None = None
    version_oldest: int | None = None
    version_newest: int | None = None
    staleness: int | None = None
    waited_s: float = 0.0
    waited_last_s: float | None = None
    busy: float | None = None
    carried_tokens: int | None = None
    held_tokens: int | None = None
    pressure: str = ""
    length_p50_tokens: float | None = None
    length_p95_tokens: float | None = None
    sample_waited_p95_s: float | None = None
    pulled: int = 0
    pulled_bytes: int = 0
    refused: int = 0
    unavailable: int = 0
    recovered: int = 0
    resampled_tokens: int = 0
    salvaged_tokens: int = 0
    rechecked: int = 0
    difference_most: float | None = None
    violations: int = 0
    environment_p95_s: float | None = None
    environment_waiting: int | None = None
    environment_failed: int = 0
    pending: int | None = None
    running: int | None = None
    ready: int | None = None
    trained: int | None = None
    dropped: int | None = None
    skipped: int | None = None
    awaited: int | None = None
    staleness_most: int | None = None
    duplicates: int | None = None
    reward: float | None = None


class IslandView(msgspec.Struct, frozen=True, kw_only=True):
    """The part of this run in a sea: merges that it adopted, bytes, and waits."""

    island: str
    state: str
    tide: int
    step: int | None = None
    islands: int | None = None
    merges: int = 0
    waited_s: float = 0.0
    waited_last_s: float | None = None
    sent_bytes: int = 0
    fetched_bytes: int = 0
    given: int = 0


class Point(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A bucket of a series: where it begins, mean, least and most of its values, their number."""

    at: float
    mean: float
    least: float
    most: float
    count: int


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """A series; ``width`` is that of its buckets, in seconds or steps."""

    name: str
    width: float
    points: tuple[Point, ...]


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run at ``now_s``. ``shares`` are seconds by class and add up to ``wall_s``.

    ``steps_lost`` were executed again. ``counts`` are the exact numbers of events by kind, and
    ``damaged`` those of lines that are no events. ``progress`` is the number of complete steps over
    time, ``curves`` have the logged metrics over steps. ``unheard`` are nodes that the coordinator
    knows, and of which no events are read. ``timed`` is False if events that tell the time of steps
    are not read: then goodput, ``shares`` and costs are not those of the run.
    """

    run: str
    state: JobState
    message: str
    now_s: float
    started_s: float | None
    ended_s: float | None
    wall_s: float
    step: int
    generation: int
    world: int
    wanted: dict[str, int]
    step_s: float | None
    goodput: float
    shares: dict[str, float]
    steps_lost: int
    lost_s: float
    recoveries_s: float
    losses: int
    protection: ProtectionView
    checkpoints: CheckpointsView
    nodes: tuple[NodeView, ...]
    recoveries: tuple[RecoveryView, ...]
    faults: tuple[FaultView, ...]
    stragglers: tuple[StragglerView, ...]
    messages: tuple[RunMessage, ...]
    rollouts: RolloutsView | None
    island: IslandView | None
    progress: Curve
    step_times: Curve
    stalls: Curve
    curves: tuple[Curve, ...]
    counts: dict[str, int]
    damaged: int = 0
    source: Source = "events"
    unheard: tuple[str, ...] = ()
    timed: bool = True
