"""Events of launcher, agents and sidecars: processes, generations, faults. Pure."""

from __future__ import annotations

import msgspec

from holdfast.ckpt.events import Event


class JobStarted(Event, frozen=True, kw_only=True, tag="job_started"):
    """The launcher starts a job."""

    run: str = ""
    """Identifier of the run."""

    nodes: tuple[str, ...] = ()
    """Names of the nodes that start with it."""

    wanted: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of workers wanted, by role."""


class JobEnded(Event, frozen=True, kw_only=True, tag="job_ended"):
    """The job is over; the last event of its launcher."""

    ok: bool
    """True if every step is complete."""

    message: str = ""
    """Reason of the end, in words."""


class EventsLost(Event, frozen=True, kw_only=True, tag="events_lost"):
    """Events before this one could not be written, as on a full disk."""

    count: int
    """Number of them."""


class WorkProgressed(Event, frozen=True, kw_only=True, tag="work_progress"):
    """A command has done a part of long work on bytes; told every few seconds, and at its end."""

    work: str
    """Kind of work, such as ``converting``."""

    bytes: int
    """Bytes that are done."""

    total_bytes: int | None = None
    """Bytes that there are, null where it is not known."""

    bytes_per_s: float | None = None
    """Rate of the newest part, in bytes per second; null where it is not known."""

    left_s: float | None = None
    """Expected time to the end, in seconds; null where it is not known."""

    ended: str = ""
    """End of the work: ``done``, ``interrupted`` or ``failed``; empty while it goes on."""


class NodeExited(Event, frozen=True, kw_only=True, tag="node_exited"):
    """A node's agent ended while the job goes on."""

    victim: str
    """Name of the node."""

    status: str
    """The end of the agent, in words."""

    memory_kept: bool
    """True if the node's snapshots are still in memory."""


class WorkerStarted(Event, frozen=True, kw_only=True, tag="worker_started"):
    """An agent started the process of a seat."""

    pid: int
    """Process id."""

    attempt: int = 0
    """Number of the seat's start, the first is 1."""


MOVED = "it moved to another role"
"""The end, in words, of a worker whose place moved to another role."""


class WorkerExited(Event, frozen=True, kw_only=True, tag="worker_exited"):
    """The process of a seat ended."""

    pid: int
    """Process id."""

    status: str
    """The end, in words: exit status or signal, and the cause if it is known."""


class Detected(Event, frozen=True, kw_only=True, tag="detected"):
    """A change that calls for a decision was noticed: a loss, a join or a notice."""

    what: str
    """One of ``exit``, ``hang``, ``stopped``, ``stall``, ``join``, ``notice``, ``node_lost``,
    ``unreachable``, ``lease_lost`` and ``sidecar_exit``."""

    victim: str
    """Seat or node that it is about; of a sidecar ``<node>/sidecar``."""

    why: str = ""
    """Cause, in words."""

    grace_s: float | None = None
    """With ``notice``: seconds until the node is taken away."""

    pid: int | None = None
    """With ``sidecar_exit``: process id of the sidecar that ended."""


class WorkerStack(Event, frozen=True, kw_only=True, tag="stack"):
    """A worker that makes no progress said where it stands."""

    how: str
    """Source of the stacks: ``faulthandler``, ``py-spy`` or ``none``."""

    at: str
    """Innermost frame of the main thread."""

    text: str
    """Stacks of all threads."""

    kernel: str
    """State of the process and what it waits for in the kernel, as far as it can be read."""


class JobSeated(Event, frozen=True, kw_only=True, tag="seated"):
    """A node decided which worker runs where, and the coordinator accepted it."""

    reason: str
    """Reason of the decision, in words."""


class RoleMoved(Event, frozen=True, kw_only=True, tag="role_moved"):
    """A worker's place moves from one role to another, because one role waits for the other."""

    was: str
    """Seat that ends."""

    becomes: str
    """Seat that begins in its slot."""

    on: str
    """Name of the node; empty if the place has no node at present."""

    why: str
    """Reason, in words."""

    waits: float | None = None
    """Share of a step for which the trainers waited for the others, from 0 to 1; null if the place
    goes back to its own role."""

    works: float | None = None
    """Share of a step for which the others were at work, from 0 to 1."""

    step_s: float | None = None
    """Seconds of a step before the move."""

    expected_s: float | None = None
    """Seconds of a step that are expected after it."""


class GenerationProposed(Event, frozen=True, kw_only=True, tag="proposed"):
    """A node proposed a generation, and the coordinator accepted it."""

    generation: int
    """Number of the generation."""

    ranks: tuple[str, ...] = ()
    """Seats of its trainers, by rank."""

    restore_step: int | None = None
    """Step in memory that it restores, null for none."""

    restore_how: str = ""
    """Source of the state: ``memory``, ``parity`` or ``none``."""

    reason: str = ""
    """Reason of the proposal, in words."""


class FencingBegun(Event, frozen=True, kw_only=True, tag="fencing"):
    """A node begins to fence a generation: its workers may not act in it any more."""

    generation: int
    """Number of the generation that is over."""

    reason: str
    """Reason, in words."""


class FencingDone(Event, frozen=True, kw_only=True, tag="fenced"):
    """No worker of a node acts in a generation any more, and its sidecar refuses to take part."""

    generation: int
    """Number of the generation that is over."""


class WorkerHalted(Event, frozen=True, kw_only=True, tag="halted"):
    """A trainer stands at the end of a step, so that others can join."""

    generation: int
    """Generation that it is in."""

    step: int
    """Step at whose end it stands."""


class WorkerHandedOver(Event, frozen=True, kw_only=True, tag="handed_over"):
    """A trainer of a node that leaves has handed over: the step is safe without it."""

    generation: int
    """Generation that it is in."""

    step: int
    """Step that is safe."""


class NodeLeaving(Event, frozen=True, kw_only=True, tag="leaving"):
    """A node leaves the job after a notice."""

    reason: str
    """The wait before it left, in words."""


class NodeReachable(Event, frozen=True, kw_only=True, tag="reachable"):
    """A node reaches another again, which it had told unreachable."""

    victim: str
    """Name of the other node."""


class StragglerFound(Event, frozen=True, kw_only=True, tag="straggler"):
    """A rank holds the others up."""

    victim: str
    """Seat of the rank."""

    on: str
    """Node that it is on."""

    why: str
    """The finding, in words."""

    times: float
    """Ratio of its time for a microbatch to the median of the others."""

    microbatch_s: float
    """Seconds that it takes for a microbatch."""

    others_s: float
    """Seconds that the others take, in the median."""

    waits: float
    """Share of a step in which it waits for others, from 0 to 1."""

    data: float
    """Share of its own time in which it waits for its data, from 0 to 1."""

    busy: float
    """Share of its own time in which its processor is busy, from 0 to 1."""

    computes: bool
    """True if it computes all that time, rather than wait for something of its own."""


class StragglerOver(Event, frozen=True, kw_only=True, tag="straggler_over"):
    """A rank that held the others up keeps up again."""

    victim: str
    """Seat of the rank."""


class SidecarStarted(Event, frozen=True, kw_only=True, tag="sidecar_started"):
    """A node's sidecar serves."""

    pid: int = 0
    """Process id."""

    address: str = ""
    """Address at which it serves."""


class SidecarFailed(Event, frozen=True, kw_only=True, tag="sidecar_failed"):
    """A node's sidecar does not start."""

    error: str
    """Message of the error."""


class FaultInjected(Event, frozen=True, kw_only=True, tag="fault"):
    """A demo, a benchmark or a chaos run hurt the job."""

    what: str
    """Kind of the fault, as ``kill`` or ``kill_node``."""

    victim: str
    """Seat or node that was hurt, or the name of another part."""

    on: str
    """Node of the victim, empty where there is none."""

    seats: tuple[str, ...] = ()
    """Seats of the workers that were hit."""

    pids: tuple[int, ...] = ()
    """Process ids that were hit."""

    number: int | None = None
    """Number of the strike in its scenario, null outside of scenarios."""

    lasts_s: float = 0.0
    """Seconds that it lasts, 0 for one that is over at once or lasts for good."""


class FaultOver(Event, frozen=True, kw_only=True, tag="fault_over"):
    """A fault that lasted was undone."""

    what: str
    """Kind of the fault and its victim, in words."""
