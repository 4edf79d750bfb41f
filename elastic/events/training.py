"""Events of trainers: steps, snapshots, restores, checkpoints, data. Pure."""

from __future__ import annotations

import msgspec

from holdfast.ckpt.events import Event


class RankReformed(Event, frozen=True, kw_only=True, tag="reformed"):
    """A rank has entered a generation: its process groups are formed."""

    generation: int
    """Number of the generation."""

    rank: int = 0
    """Rank of the worker."""

    world: int = 0
    """World size."""


class StateRestored(Event, frozen=True, kw_only=True, tag="restored"):
    """A rank has its state, from the best source there was."""

    generation: int
    """Number of the generation."""

    rank: int = 0
    """Rank of the worker."""

    step: int = 0
    """Step that the state is of."""

    tier: str = ""
    """Farthest source that was used: ``arena``, ``prefetched``, ``peer``, ``parity``, ``disk``,
    ``checkpoint``, or ``none`` where the state is as it was built."""

    how: str = ""
    """The way of the restore, in words."""

    bytes: int = 0
    """Bytes that were restored."""

    tiers: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    """The ``bytes`` from each source, and the ``seconds`` that threads spent on them."""

    sent_bytes: int = 0
    """Bytes that other nodes sent for it while training stood still."""

    seconds: float = 0.0
    """Seconds that it took."""

    per_rank: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Per-rank values that did not come back to their own rank: ``built`` (none was saved for this
    rank), ``merged`` from all ranks, ``carried`` here for ranks that are gone, ``dropped`` for
    good (said by rank 0)."""


class StateApproximate(Event, frozen=True, kw_only=True, tag="approximate"):
    """Stages of the state were set from their neighbours, in this generation or in an earlier one.

    Told in every generation that goes on with such a state, once for each time that it happened.
    """

    generation: int
    """Number of the generation."""

    step: int
    """Complete steps at the time when the stages were set from others."""

    stages: dict[str, tuple[int, ...]]
    """The numbers of the stages, each with the numbers of the stages that it was set from."""

    fresh: bool
    """True in the generation that set them, false in those that go on with it."""

    text: str
    """The mark that every later checkpoint has, in words."""


class RestoreProgressed(Event, frozen=True, kw_only=True, tag="restore_progress"):
    """A rank has read a part of a checkpoint; told every few seconds of a long restore."""

    generation: int
    """Number of the generation that restores."""

    rank: int
    """Rank of the worker."""

    step: int
    """Step of the checkpoint."""

    bytes: int
    """Bytes of this rank's part that are in place."""

    total_bytes: int
    """Bytes of this rank's part."""

    bytes_per_s: float
    """Rate since the beginning, in bytes per second."""

    left_s: float
    """Expected time to the end, in seconds."""


class RestoreFailed(Event, frozen=True, kw_only=True, tag="restore_failed"):
    """A restore point could not be read, and the ranks agreed on another."""

    generation: int
    """Number of the generation that restores."""

    step: int
    """Step that could not be restored."""

    of: int
    """Generation that took the snapshot."""

    reason: str
    """Cause, in words."""

    next_step: int | None
    """Step that is tried next, null where memory has none."""

    next: str
    """The next attempt, in words."""


class DiskRefused(Event, frozen=True, kw_only=True, tag="disk_refused"):
    """The nodes' disks hold a step that is newer than all others, and too little of it."""

    step: int
    """Step that cannot be restored."""

    reason: str
    """The missing parts, in words, and the newest checkpoint."""

    newest_checkpoint: int
    """Step of the newest checkpoint, -1 for none."""


class TrainingResumed(Event, frozen=True, kw_only=True, tag="resumed"):
    """A generation has completed its first step."""

    generation: int
    """Number of the generation."""

    step: int
    """Number of complete steps."""


class StepDone(Event, frozen=True, kw_only=True, tag="step"):
    """A rank has completed a step."""

    step: int
    """Number of complete steps, this one included."""

    generation: int = 0
    """Number of the generation."""

    rank: int = 0
    """Rank of the worker."""

    start_s: float = 0.0
    """Wall clock time at which the step began, in seconds since 1970; 0 where it is not told."""

    seconds: float = 0.0
    """Seconds that the step took."""

    stall_s: float = 0.0
    """Seconds in which snapshots held training up."""

    protected: int = -1
    """Newest protected step that the rank knows of, -1 for none."""

    unprotected_s: float = 0.0
    """Age of the work that a failure would cost now, in seconds."""

    copied_bytes: int | None = None
    """Bytes that the rank has copied for snapshots in this generation; null without snapshots."""

    discarded: int = 0
    """Number of snapshots given up in this generation."""

    waited_s: float = 0.0
    """Seconds in which the rank waited for others."""

    quiet_s: float | None = None
    """Longest time without a heartbeat while computing, in seconds; null where it is not told."""

    data_s: float = 0.0
    """Seconds in which the rank waited for data."""

    cpu_s: float = 0.0
    """Processor seconds that the process used."""

    microbatches: int = 0
    """Number of microbatches that the rank ran."""

    @property
    def began_s(self) -> float:
        """When the step began, in seconds since 1970; from its end where that is not told."""
        return self.start_s or self.time_s - self.seconds


class MetricsLogged(Event, frozen=True, kw_only=True, tag="metric"):
    """The values that a step logged, as means over all ranks; told by rank 0."""

    step: int
    """Number of complete steps."""

    values: dict[str, float | None] = msgspec.field(default_factory=dict)
    """The values by name; null for one that is not finite."""


class LossJudged(Event, frozen=True, kw_only=True, tag="loss"):
    """The loss guard found a step's loss wrong."""

    step: int
    """Number of complete steps."""

    generation: int
    """Number of the generation."""

    why: str
    """The finding, in words."""

    action: str
    """The treatment of the step: ``warn``, ``skip``, ``rollback`` or ``stop``."""


class SharesChanged(Event, frozen=True, kw_only=True, tag="shares"):
    """The ranks share the microbatches out anew, by speed."""

    generation: int
    """Number of the generation."""

    shares: tuple[int, ...]
    """Number of microbatches by rank along the data-parallel axis."""

    reason: str
    """Reason, in words."""


class StepProtected(Event, frozen=True, kw_only=True, tag="protected"):
    """A step is protected: it survives the loss of as many nodes as parity covers."""

    generation: int
    """Generation that took the snapshot."""

    step: int
    """The step."""

    seconds: float = 0.0
    """Seconds from the end of the step to its protection."""


class StepUnprotected(Event, frozen=True, kw_only=True, tag="unprotected"):
    """A step is not protected for the time being."""

    generation: int
    """Generation that took the snapshot."""

    step: int
    """The step."""

    reason: str
    """Reason, in words."""


class SnapshotsLeftOut(Event, frozen=True, kw_only=True, tag="snapshots_left_out"):
    """A rank takes no snapshots for want of room; told at the first, second, fourth, … time."""

    generation: int
    """Number of the generation."""

    step: int
    """Step whose snapshot is left out."""

    count: int
    """Number of snapshots left out so far in this generation."""

    newest: int
    """Step of the newest snapshot."""

    reason: str
    """Reason, in words."""


class CheckpointWaiting(Event, frozen=True, kw_only=True, tag="checkpoint_waiting"):
    """The job is complete but for its last checkpoint, which is being written."""

    step: int
    """Step that the checkpoint holds."""

    done: float
    """Share of it that is written, from 0 to 1."""


class CheckpointUnsaved(Event, frozen=True, kw_only=True, tag="checkpoint_unsaved"):
    """The last checkpoint of the job was not saved, and the job ends without it."""

    step: int
    """Step of the checkpoint."""

    error: str
    """Cause and the newest checkpoint, in words."""


class WorkerRehearsed(Event, frozen=True, kw_only=True, tag="rehearsed"):
    """A worker that is about to join rehearsed a step while the others trained."""

    rank: int
    """Rank that it expects to have, -1 where that was not found out."""

    world: int
    """World size that it expects."""

    error: str
    """Reason of an early end, in words; empty when the first step was reached."""

    over: bool
    """True if it ended since the others did not train any more."""

    seconds: float
    """Seconds that it took."""


class StatePrefetched(Event, frozen=True, kw_only=True, tag="prefetched"):
    """A worker that is about to join has fetched state from the others."""

    generation: int
    """Generation that took the snapshot."""

    step: int
    """Step that the state is of."""

    wanted_bytes: int
    """Bytes that the worker needs."""

    held_bytes: int
    """Bytes of them that it has of this step."""

    fetched_bytes: int
    """Bytes that travelled for it in all."""

    seconds: float
    """Seconds that it waited for them."""


class LoaderEvent(Event, frozen=True, kw_only=True):
    """Something that happened to the processes that load a rank's data."""

    rank: int = 0
    """Rank of the worker."""

    loader: str
    """Name of the loader."""


class DataWorkersForked(LoaderEvent, frozen=True, kw_only=True, tag="data_workers_forked"):
    """A loader forks its worker processes from the rank, since they cannot be started otherwise."""

    why: str
    """Reason, in words."""


class DataWorkerDeath(LoaderEvent, frozen=True, kw_only=True, tag="data_worker_died"):
    """A worker process of a loader died; all of them are started again."""

    how: str
    """The end of the process, in words."""

    times: int
    """Number of such failures since the last batch."""


class DataWorkerHang(LoaderEvent, frozen=True, kw_only=True, tag="data_worker_stuck"):
    """A worker process of a loader gave no batch in time; all of them are started again."""

    how: str
    """The last thing that the process was seen to do, in words."""

    times: int
    """Number of such failures since the last batch."""
