"""The catalogue of faults: effect, possible victims, and worlds of each. Pure data."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

Part: TypeAlias = Literal[
    "worker",
    "sidecar",
    "agent",
    "node",
    "launcher",
    "coordinator",
    "store",
    "job",
    "island",
    "policy",
    "environment",
]
"""Parts that can be hit.

"job" is the whole job, "launcher" the process that starts its nodes, "island" all nodes of one of
its islands, "policy" all nodes of the run of one of its policies, "environment" a process in which
a rollout worker runs its environment. A job without Holdfast has only "job" and its workers.
"""

World: TypeAlias = Literal["real", "simulated"]


class FaultInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of fault.

    ``parts`` can be hit; the first is the default. ``lasts`` says whether the fault lasts for a
    time; ``amount`` describes the meaning of its amount, with unit and default, "" for none.
    ``memory`` says whether the node that is hit may lose its memory.
    """

    about: str
    parts: tuple[Part, ...]
    worlds: tuple[World, ...] = ("real",)
    lasts: bool = False
    amount: str = ""
    memory: bool = False


BOTH: Final[tuple[World, ...]] = ("real", "simulated")
_SIMULATED: Final[tuple[World, ...]] = ("simulated",)
_PROCESSES: Final[tuple[Part, ...]] = ("node", "worker", "sidecar", "agent")
_WRITERS: Final[tuple[Part, ...]] = ("sidecar", "worker", "node", "job")
"""Parts that write files below the run's folder."""

CATALOGUE: Final[dict[str, FaultInfo]] = {
    "kill": FaultInfo(
        about="SIGKILL",
        parts=(
            *("worker", "sidecar", "agent", "node", "launcher", "coordinator", "job", "island"),
            *("policy", "environment"),
        ),
        worlds=BOTH,
        memory=True,
    ),
    "lose": FaultInfo(
        about="a machine vanishes with its memory; it returns after lasts_s. An island, or the run "
        "of a policy, is started anew then",
        parts=("node", "island", "policy"),
        worlds=BOTH,
        lasts=True,
        memory=True,
    ),
    "stop": FaultInfo(
        about="SIGSTOP, and SIGCONT after lasts_s",
        parts=(
            *("worker", "sidecar", "agent", "node", "coordinator", "job", "island", "policy"),
            "environment",
        ),
        worlds=BOTH,
        lasts=True,
        memory=True,
    ),
    "preempt": FaultInfo(
        about="SIGTERM, and SIGKILL after the grace time",
        parts=("node", "worker"),
        amount="grace in seconds (10)",
    ),
    "slow": FaultInfo(
        about="stopped and continued, again and again",
        parts=("worker", "sidecar", "agent", "node", "island", "policy"),
        lasts=True,
        amount="share of the time in which it is stopped (0.8)",
    ),
    "join": FaultInfo(
        about="an absent node joins: a spare one, or one that was lost or left, or that of an "
        "absent island, with the whole island",
        parts=("job",),
    ),
    "leave": FaultInfo(
        about="a node gets notice and leaves in order; it returns after lasts_s",
        parts=("node",),
        lasts=True,
    ),
    "exit": FaultInfo(
        about="the process ends at once with a status, without cleaning up",
        parts=("worker", "sidecar", "agent"),
        amount="exit status (1)",
        memory=True,
    ),
    "segfault": FaultInfo(
        about="the process writes to address 0",
        parts=("worker", "sidecar", "agent"),
        memory=True,
    ),
    "gil-lockup": FaultInfo(
        about="C code hangs with Python's global lock held",
        parts=("worker", "sidecar", "agent"),
        lasts=True,
        memory=True,
    ),
    "memory-balloon": FaultInfo(
        about="the process allocates memory until the machine has 512 MiB left",
        parts=("worker", "sidecar", "agent"),
        lasts=True,
        amount="MiB (1024)",
    ),
    "cpu-burn": FaultInfo(
        about="threads of the process keep processors busy, without Python's global lock",
        parts=("worker", "sidecar", "agent"),
        lasts=True,
        amount="threads (as many as processors)",
    ),
    "cpu-throttle": FaultInfo(
        about="a control group (cgroup) limits the processor time of its processes",
        parts=("worker", "sidecar", "agent", "node"),
        lasts=True,
        amount="processors they may use together (0.1)",
    ),
    "memory-limit": FaultInfo(
        about="a control group (cgroup) limits the memory that its processes allocate from now on",
        parts=("worker", "sidecar", "agent", "node"),
        lasts=True,
        amount="MiB (64)",
        memory=True,
    ),
    "environment-garbage": FaultInfo(
        about="bytes that are no message come from an environment process",
        parts=("environment",),
    ),
    "environment-memory": FaultInfo(
        about="an environment process gets no more memory",
        parts=("environment",),
    ),
    "slow-rank": FaultInfo(
        about="every optimizer step of one rank takes longer",
        parts=("worker",),
        lasts=True,
        amount="seconds per step (1)",
    ),
    "nan-loss": FaultInfo(
        about="the next loss of one rank is NaN, and so are the gradients from it",
        parts=("worker",),
    ),
    "inf-loss": FaultInfo(
        about="the next loss of one rank is infinite, and so are the gradients from it",
        parts=("worker",),
    ),
    "corrupt-gradient": FaultInfo(
        about="bits of one rank's gradients flip before its next optimizer step",
        parts=("worker",),
        amount="bits (1)",
    ),
    "engine-kill": FaultInfo(about="SIGKILL for the server that it keeps", parts=("worker",)),
    "engine-hang": FaultInfo(
        about="the server that it keeps answers nothing any more, in the middle of its answers",
        parts=("worker",),
        lasts=True,
    ),
    "engine-garbage": FaultInfo(
        about="the server that it keeps sends what is no event of an answer",
        parts=("worker",),
        amount="number of answers (1)",
    ),
    "engine-slow": FaultInfo(
        about="every token of the server that it keeps takes longer",
        parts=("worker",),
        lasts=True,
        amount="seconds per token (1)",
    ),
    "engine-stale": FaultInfo(
        about="the server that it keeps goes back to the weights that it had before",
        parts=("worker",),
        lasts=True,
    ),
    "engine-memory": FaultInfo(
        about="the server that it keeps gets no memory any more",
        parts=("worker",),
        lasts=True,
    ),
    "flip-slot": FaultInfo(
        about="bits flip in a snapshot in a node's memory",
        parts=("node",),
        amount="bits (1)",
        memory=True,
    ),
    "flip-parity": FaultInfo(
        about="bits flip in a row of parity in a node's memory",
        parts=("node",),
        amount="bits (1)",
        memory=True,
    ),
    "flip-spill": FaultInfo(
        about="bits flip in a snapshot on a node's disk, below the run's folder",
        parts=("node",),
        amount="bits (1)",
        memory=True,
    ),
    "flip-pack": FaultInfo(
        about="bits flip in the data of the newest checkpoint below the run's folder",
        parts=("job", "store"),
        amount="bits (1)",
    ),
    "flip-manifest": FaultInfo(
        about="bits flip in the manifest of the newest checkpoint below the run's folder",
        parts=("job", "store"),
        amount="bits (1)",
    ),
    "flip-wire": FaultInfo(
        about="bits flip in messages between a node and the sidecars of others",
        parts=("node",),
        lasts=True,
        amount="mean number of bytes between two flips (10000000)",
    ),
    "disk-full": FaultInfo(
        about="ENOSPC on new files and writes below the run's folder",
        parts=_WRITERS,
        lasts=True,
    ),
    "disk-error": FaultInfo(
        about="EIO on reads, writes and fsync below the run's folder",
        parts=_WRITERS,
        lasts=True,
    ),
    "disk-write-error": FaultInfo(
        about="EIO on writes and fsync below the run's folder; reads work",
        parts=_WRITERS,
        lasts=True,
    ),
    "disk-readonly": FaultInfo(
        about="EROFS on every change of files below the run's folder",
        parts=_WRITERS,
        lasts=True,
    ),
    "disk-slow": FaultInfo(
        about="each read, write and fsync below the run's folder takes longer",
        parts=_WRITERS,
        lasts=True,
        amount="seconds per call (0.05)",
    ),
    "disk-torn": FaultInfo(
        about="the next write below the run's folder is cut short, then SIGKILL",
        parts=_WRITERS,
        amount="share of the write that is done (0.5)",
        memory=True,
    ),
    "clock-jump": FaultInfo(
        about="the wall clock jumps, and back after lasts_s",
        parts=(*_PROCESSES, "job"),
        lasts=True,
        amount="seconds, also negative (3600)",
    ),
    "clock-skew": FaultInfo(
        about="the wall clock runs too fast or too slowly",
        parts=(*_PROCESSES, "job"),
        lasts=True,
        amount="seconds gained per second, also negative (0.1)",
    ),
    "sea-cut": FaultInfo(
        about="reads and writes of an island at the meeting place of its sea time out",
        parts=("island",),
        lasts=True,
    ),
    "store-error": FaultInfo(
        about="the S3 store answers every request with an error",
        parts=("store",),
        lasts=True,
        amount="HTTP status (500)",
    ),
    "store-throttle": FaultInfo(
        about="the S3 store answers requests with 503 SlowDown",
        parts=("store",),
        lasts=True,
        amount="every Nth request (2)",
    ),
    "store-slow": FaultInfo(
        about="the S3 store receives and sends bytes slowly",
        parts=("store",),
        lasts=True,
        amount="bytes per second of each request (100000)",
    ),
    "store-truncate": FaultInfo(
        about="replies of the S3 store end in the middle",
        parts=("store",),
        lasts=True,
        amount="every Nth read (2)",
    ),
    "store-lost-reply": FaultInfo(
        about="the S3 store executes the request, and the reply is lost",
        parts=("store",),
        lasts=True,
        amount="every Nth request (2)",
    ),
    "store-stale-list": FaultInfo(
        about="the S3 store returns an outdated listing",
        parts=("store",),
        lasts=True,
        amount="every Nth listing (1)",
    ),
    "coordinator-restart": FaultInfo(
        about="members of etcd are killed and started again after lasts_s",
        parts=("coordinator",),
        worlds=BOTH,
        lasts=True,
    ),
    "coordinator-latency": FaultInfo(
        about="members of etcd answer late",
        parts=("coordinator",),
        lasts=True,
        amount="seconds at most (0.1)",
    ),
    "coordinator-compaction": FaultInfo(
        about="etcd forgets all but the newest revision",
        parts=("coordinator",),
    ),
    "leader-kill": FaultInfo(
        about="the leader of etcd is killed, and started again after lasts_s",
        parts=("coordinator",),
        lasts=True,
    ),
    "lease-lost": FaultInfo(
        about="the lease of a node's agent is revoked in etcd",
        parts=("node", "coordinator"),
    ),
    "partition": FaultInfo(
        about="all connections with others are cut, both ways",
        parts=_PROCESSES,
        worlds=BOTH,
        lasts=True,
    ),
    "partition-in": FaultInfo(
        about="nothing that others send arrives",
        parts=_PROCESSES,
        worlds=BOTH,
        lasts=True,
    ),
    "partition-out": FaultInfo(
        about="nothing that it sends arrives at others",
        parts=_PROCESSES,
        worlds=BOTH,
        lasts=True,
    ),
    "partition-pair": FaultInfo(
        about="two nodes are cut off from each other, and from no other",
        parts=("node",),
        worlds=BOTH,
        lasts=True,
    ),
    "network-loss": FaultInfo(
        about="packets on connections with others are lost",
        parts=_PROCESSES,
        lasts=True,
        amount="share of packets (0.1)",
    ),
    "network-delay": FaultInfo(
        about="every send over TCP takes longer",
        parts=_PROCESSES,
        lasts=True,
        amount="seconds per send (0.05)",
    ),
    "network-reset": FaultInfo(
        about="all connections with others are reset",
        parts=_PROCESSES,
    ),
    "half-open": FaultInfo(
        about="its ends of all connections vanish without a message to the others",
        parts=_PROCESSES,
    ),
    "hang": FaultInfo(
        about="makes no progress and never reacts again",
        parts=("worker",),
        worlds=_SIMULATED,
    ),
    "crash": FaultInfo(
        about="a machine vanishes at one of its next calls to the coordinator, before or after "
        "the call took effect; it returns after lasts_s",
        parts=("node",),
        worlds=_SIMULATED,
        lasts=True,
        memory=True,
    ),
    "split": FaultInfo(
        about="some nodes and the others do not reach each other; all reach the coordinator",
        parts=("node",),
        worlds=_SIMULATED,
        lasts=True,
    ),
    "weather": FaultInfo(
        about="messages on all connections are lost, duplicated and delayed",
        parts=("job",),
        worlds=_SIMULATED,
        lasts=True,
        amount="severity, from 0 to 1 (0.5)",
    ),
    "outage": FaultInfo(
        about="answers nobody",
        parts=("coordinator",),
        worlds=_SIMULATED,
        lasts=True,
    ),
}
"""Kind → its description. `registry.INJECTORS` has the injector of each kind."""

OF_ISLANDS: Final = frozenset(
    {
        *("kill", "lose", "stop", "slow", "join", "leave", "preempt", "sea-cut"),
        *("disk-full", "disk-error", "disk-write-error", "disk-readonly", "disk-slow"),
    }
)
"""Kinds of faults that hit a job of several islands."""

OF_POLICIES: Final = OF_ISLANDS - {"sea-cut"}
"""Kinds of faults that hit a job in which each policy has a run of its own."""
