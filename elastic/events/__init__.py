"""Events: what happens in a job, as lines of JSON that people, tools and your own readers share.

Every process of a job writes to the file of its node, `events-<node>.jsonl` in the run directory.
A line is one event: an object with the name of its ``kind``, the
fields of `Event`, and those of the kind. Each kind is a struct in this package; the reference page
of events is made from them.

    from holdfast.elastic.events import StateRestored
    from holdfast.elastic.events.log import EventReader

    for event in EventReader(run_dir).new():
        match event:
            case StateRestored(step=step, tier=tier):
                print(event.node, step, tier)

Events of your own are a `UserEvent`: ``run.emit(UserEvent(name="evaluated", fields={...}))``.

The rule for change: a kind and a field are only ever added, a new field with a default; their
names and units are never used for anything else. So readers skip kinds and fields that they do not
know. A change that this rule does not allow raises the version ``v`` on every line, and
`decode` turns what older versions wrote into today's events. A line without
``v`` is of version 1. Quantities have their unit in their name: it ends in ``_s``, ``_bytes`` or
``_tokens``, or is ``seconds``, ``bytes`` or ``tokens``.
"""

from holdfast.ckpt.events import (
    CheckpointCarried,
    CheckpointDone,
    CheckpointFailed,
    CheckpointProgress,
    CheckpointRetried,
    CheckpointSkipped,
    CheckpointStarted,
    Event,
)
from holdfast.elastic.events.islands import (
    IslandJoined,
    IslandLeft,
    TideAdopted,
    TidePublished,
    WeightsGiven,
)
from holdfast.elastic.events.job import (
    Detected,
    EventsLost,
    FaultInjected,
    FaultOver,
    FencingBegun,
    FencingDone,
    GenerationProposed,
    JobEnded,
    JobSeated,
    JobStarted,
    NodeExited,
    NodeLeaving,
    NodeReachable,
    SidecarFailed,
    SidecarStarted,
    StragglerFound,
    StragglerOver,
    WorkerExited,
    WorkerHalted,
    WorkerHandedOver,
    WorkerStack,
    WorkerStarted,
    WorkProgressed,
)
from holdfast.elastic.events.rollouts import (
    BackPressure,
    EnvironmentWaits,
    EpisodesPlayed,
    LedgerCounted,
    RecheckSkipped,
    RolloutLeft,
    RolloutRecovered,
    RolloutsAwaited,
    RuleViolated,
    SampledUnprotected,
    SampleRechecked,
    SamplingChanged,
    StepTail,
    TokensSampled,
    TrainingHeld,
    VersionUnavailable,
    WeightsPulled,
    WeightsRefused,
)
from holdfast.elastic.events.training import (
    CheckpointUnsaved,
    CheckpointWaiting,
    DataWorkerDeath,
    DataWorkerHang,
    DataWorkersForked,
    DiskRefused,
    LoaderEvent,
    LossJudged,
    MetricsLogged,
    RankReformed,
    RestoreFailed,
    RestoreProgressed,
    SharesChanged,
    SnapshotsLeftOut,
    StatePrefetched,
    StateRestored,
    StepDone,
    StepProtected,
    StepUnprotected,
    TrainingResumed,
    WorkerRehearsed,
)
from holdfast.elastic.events.wire import (
    KINDS,
    EventFormatError,
    UserEvent,
    decode,
    encode,
    of_fields,
    of_kind,
)

__all__ = [
    "KINDS",
    "BackPressure",
    "CheckpointCarried",
    "CheckpointDone",
    "CheckpointFailed",
    "CheckpointProgress",
    "CheckpointRetried",
    "CheckpointSkipped",
    "CheckpointStarted",
    "CheckpointUnsaved",
    "CheckpointWaiting",
    "DataWorkerDeath",
    "DataWorkerHang",
    "DataWorkersForked",
    "Detected",
    "DiskRefused",
    "EnvironmentWaits",
    "EpisodesPlayed",
    "Event",
    "EventFormatError",
    "EventsLost",
    "FaultInjected",
    "FaultOver",
    "FencingBegun",
    "FencingDone",
    "GenerationProposed",
    "IslandJoined",
    "IslandLeft",
    "JobEnded",
    "JobSeated",
    "JobStarted",
    "LedgerCounted",
    "LoaderEvent",
    "LossJudged",
    "MetricsLogged",
    "NodeExited",
    "NodeLeaving",
    "NodeReachable",
    "RankReformed",
    "RecheckSkipped",
    "RestoreFailed",
    "RestoreProgressed",
    "RolloutLeft",
    "RolloutRecovered",
    "RolloutsAwaited",
    "RuleViolated",
    "SampleRechecked",
    "SampledUnprotected",
    "SamplingChanged",
    "SharesChanged",
    "SidecarFailed",
    "SidecarStarted",
    "SnapshotsLeftOut",
    "StatePrefetched",
    "StateRestored",
    "StepDone",
    "StepProtected",
    "StepTail",
    "StepUnprotected",
    "StragglerFound",
    "StragglerOver",
    "TideAdopted",
    "TidePublished",
    "TokensSampled",
    "TrainingHeld",
    "TrainingResumed",
    "UserEvent",
    "VersionUnavailable",
    "WeightsGiven",
    "WeightsPulled",
    "WeightsRefused",
    "WorkProgressed",
    "WorkerExited",
    "WorkerHalted",
    "WorkerHandedOver",
    "WorkerRehearsed",
    "WorkerStack",
    "WorkerStarted",
    "decode",
    "encode",
    "of_fields",
    "of_kind",
]
