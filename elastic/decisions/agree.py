"""The decision of one agent on the end of a generation and the start of the next. Pure.

Every agent calls `decide` after every change of its view, and again at the time that the answer
names. The path is *fence → agree*: as soon as one agent finds the newest generation stale, it
fences its node and publishes that in its record, which makes the generation stale for all others
too. When every node of the group has fenced (or is gone) and enough trainers are READY, each agent
could propose the same next record; they do so one after the other, and the first compare-and-set
wins. A loser decides again, as every agent does after a further failure.

Why it is safe: a record is only proposed from a view in which every node of the old group is gone
or has fenced. A node that is gone lost its lease, and its agent killed its workers before that.
``fenced`` never falls, and comes in one record with the workers' states. So no worker of an older
generation acts any more when the next one begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from holdfast.elastic.decisions.moving import moved_away
from holdfast.elastic.decisions.seating import pending_trainers
from holdfast.elastic.decisions.validity import faults, has_left, is_broken, is_stale, worker_of
from holdfast.elastic.membership.incremental import ahead, by_nodes, once
from holdfast.elastic.membership.readiness import (
    late_nodes,
    living_deciders,
    member_incarnations,
    newest_stage,
    outside_trainers,
    ready_trainers,
    unmatched_nodes,
)
from holdfast.elastic.membership.records import (
    TRAINER,
    GenerationRecord,
    JobOutcome,
    JobSpec,
    NodeRecord,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView, role_of
from holdfast.elastic.planning.holdoff import (
    HoldoffPatience,
    announced,
    held_off,
    setbacks_after,
    strangers,
)
from holdfast.elastic.planning.meshes import choose_mesh
from holdfast.elastic.planning.plan import (
    RestorePoints,
    plan,
    requested_spec,
    some_spec,
    weigh,
)
from holdfast.elastic.planning.reach import all_asked, clauses_of, left_out, parted, why_left_out

MANY_NODES = 1000
"""From this number of nodes on, planning takes two calls, so that neither takes long."""

STEP_S = 60.0
"""Time that a node without trainers gives the trainers of others to end their step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """The generation is valid.

    Ask again at ``until_s`` at the latest (None: at the next change).
    """

    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Make the local trainers of ``generation`` halt at the end of their step: others join or part.

    So the change costs no work. Ask again when they halt, and at ``until_s`` at the latest.
    """

    generation: int
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceWorkers:
    """Park or kill the local workers of ``generation`` and older, and publish that.

    Take the sidecar's inventory, and publish both with ``fenced = generation``. DONE workers stay
    as they are. The answer stays the same until this is complete.
    """

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitForFences:
    """This node has fenced, others have not; ask again at ``until_s`` at the latest."""

    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """Compare-and-set ``record`` as the newest generation against revision ``expected``."""

    record: GenerationRecord
    expected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Write the job's outcome (compare-and-set from absent)."""

    outcome: JobOutcome


Decision = Idle | Halt | FenceWorkers | WaitForFences | Propose | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreePatience:
    """The waiting times of agents, in seconds.

    ``join_settle_s``: joiners are admitted once no further trainer became ready for this time;
    ``join_settle_max_s`` bounds the wait. ``holdoff_s``: the shortest life of a generation that
    only a join would end. ``node_settle_s``: as ``join_settle_s``, for nodes without a starting
    trainer. ``start_wait_s``: the time that the first generation waits for starting trainers and
    sidecars once a trainer is ready. ``newcomer_wait_s``: the time that a re-form waits for nodes
    outside the old group. ``stagger_s``: the delay of each next node's proposal. ``patience``: the
    hold-off of nodes that come and go. ``reach_settle_s``: the time that all nodes have to report
    which nodes they reach, from the first report that two nodes of the group do not reach each
    other. Only all reports together tell an unreachable node from its neighbours.
    """

    join_settle_s: float = 0.1
    join_settle_max_s: float = 1.0
    holdoff_s: float = 0.5
    node_settle_s: float = 1.0
    start_wait_s: float = 30.0
    newcomer_wait_s: float = 0.5
    stagger_s: float = 0.05
    patience: HoldoffPatience = field(default_factory=HoldoffPatience)
    reach_settle_s: float = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSeen:
    """The times at which this agent first saw changes, for debouncing (its own monotonic seconds).

    ``looks`` counts this node's calls since all of the group had fenced. ``since`` maps the
    incarnation of a READY trainer outside the generation, or the mark of a node that its group does
    not know (`holdoff.strangers`), to the time; ``leavers`` are the nodes of the group that
    announced that they leave (`holdoff.announced`). `observe` makes each value from the one before.
    """

    number: int = -1
    number_s: float = 0.0
    fenced_s: float | None = None
    parted_s: float | None = None
    looks: int = 0
    since: Mapping[str, float] = field(default_factory=dict)
    leavers: Mapping[str, str] = field(default_factory=dict)


def observe(view: JobView, seen: FirstSeen, *, now_s: float) -> FirstSeen:
    """Return the updated first-seen times; call it with every new view before `decide`."""
    out = left_out(view)  # a node that is reachable again counts as new
    names = [worker.incarnation for node, worker in outside_trainers(view) if node.node not in out]
    names += [mark for name, mark in strangers(view).items() if name not in out]
    names += moved_away(view)
    same = seen.number == view.number
    parted_s = None
    if parted(view):
        parted_s = seen.parted_s if same and seen.parted_s is not None else now_s
    fenced_s = seen.fenced_s if same else None
    if fenced_s is None and not _unfenced(view, group=True):
        fenced_s = now_s
    return FirstSeen(
        number=view.number,
        number_s=seen.number_s if same else now_s,
        fenced_s=fenced_s,
        parted_s=parted_s,
        looks=(seen.looks if same else 0) + (fenced_s is not None),
        since={name: seen.since.get(name, now_s) for name in names},
        leavers=announced(view, seen.leavers),
    )


def decide(
    view: JobView,
    seen: FirstSeen,
    *,
    node: str,
    now_s: float,
    policy: AgreePatience | None = None,
    restore_points: RestorePoints | None = None,
    stand: bool = False,
    step_s: float = STEP_S,
) -> tuple[Decision, str]:
    """Return the next action of the agent of ``node``, and the reason.

    ``stand``: the node's trainers have halted at the end of a step, as `Halt` requested; ``step_s``
    is the time limit of the halt, after which joiners wait no longer.
    """
    policy = policy or AgreePatience()
    me = view.nodes.get(node)
    if view.outcome:
        return Idle(), "the job has ended"
    if me is None:
        return Idle(), f"node {node} is not registered"
    if view.generation is None:
        return _first(view, seen, node=node, now_s=now_s, policy=policy, points=restore_points)
    stale = is_stale(view)
    if (finished := _finish(view)) and (not stale or isinstance(finished[0], Finish)):
        return finished
    joins: list[str] = []
    if stale and not is_broken(view):
        until_s = now_s if seen.parted_s is None else seen.parted_s + policy.reach_settle_s
        if now_s < until_s and not all_asked(view):
            clauses = [*clauses_of(parted(view)), "waiting for the reports of the other nodes"]
            return Idle(until_s=until_s), "; ".join(clauses)
    if not stale:
        joins, at_s = _changes(view, seen, now_s=now_s, policy=policy)
        if stand and not me.leaving:
            joins = joins or [
                ("the worker that wanted to join is gone, but the trainers have halted")
            ]
        elif not joins:
            return Idle(until_s=at_s), f"generation {view.number} stands"
        elif at_s is not None and now_s < at_s + step_s:
            return Halt(generation=view.number, until_s=at_s + step_s), "; ".join(joins)
    if me.fenced < view.number:
        return FenceWorkers(generation=view.number), "; ".join(joins or faults(view))
    if finished:
        return WaitForFences(), finished[1]
    return _gather(view, seen, node=node, now_s=now_s, policy=policy, points=restore_points)


@by_nodes()
def _with_done(nodes: Iterable[NodeRecord]) -> dict[str, bool]:
    """Return the nodes with a worker that is DONE."""
    done = WorkerState.DONE
    return {node.node: True for node in nodes for worker in node.workers if worker.state is done}


@by_nodes()
def _without_sidecar(nodes: Iterable[NodeRecord]) -> dict[str, bool]:
    """Return the nodes whose sidecar has not started yet."""
    return {node.node: True for node in nodes if not node.sidecar}


def _finish(view: JobView) -> tuple[Finish | Idle, str] | None:
    """Return the decision on the job's end, None while no member of the generation is DONE.

    A worker is DONE only after a barrier of all ranks that follows the last step, so one DONE
    worker means that the work of all is complete. The job ends when no member works any more.
    """
    if view.generation is None or not _with_done(view):
        return None
    members = view.generation.members
    homes = [view.nodes.get(member.node) for member in members]
    workers = [
        None if home is None else worker_of(home, member)
        for home, member in zip(homes, members, strict=True)
    ]
    done = [worker for worker in workers if worker and worker.state is WorkerState.DONE]
    if newest_stage(view) > view.generation.snapshots.stage:
        done = [worker for worker in done if not worker.broke]  # these will be replaced
    if not done:
        return None
    if (gone := _parted_scripts(view, done)) is not None:
        return gone
    working = [
        member.seat
        for member, worker in zip(members, workers, strict=True)
        if worker is not None
        and (worker.lingers or worker.state not in (WorkerState.DEAD, WorkerState.DONE))
        and not has_left(worker, view.generation)
    ]
    if working:
        return Idle(), f"the work is complete; waiting for {', '.join(working)}"
    result = next((worker.result for worker in done if worker.result is not None), None)
    message = f"all steps are complete ({len(done)} of {len(members)} trainers reported)"
    return Finish(outcome=JobOutcome(ok=True, message=message, result=result)), message


def _parted_scripts(view: JobView, done: Sequence[WorkerRecord]) -> tuple[Finish, str] | None:
    """Return the job's end if some trainers' scripts are over and others began another stage."""
    number = newest_stage(view)
    ended = [worker.seat for worker in done if not worker.lingers]
    if view.generation is None or number <= view.generation.snapshots.stage or not ended:
        return None
    onward = [worker.seat for _, worker in ready_trainers(view)]
    text = (
        f"the scripts of {_names(ended)} ended after stage {number - 1}, {_names(onward)} began "
        "another: call the same decorated functions on all ranks"
    )
    return Finish(outcome=JobOutcome(ok=False, message=text)), text


def _unfenced(view: JobView, *, group: bool) -> list[str]:
    """Return the nodes that have not fenced the newest generation, in its group or outside it."""
    inside = view.generation.nodes if view.generation else view.nodes
    return [name for name in late_nodes(view) if (name in inside) is group]


def _outside_nodes(view: JobView) -> dict[str, NodeRecord]:
    """Return the live nodes with a sidecar that are not in the newest generation's group."""
    inside = view.generation.nodes if view.generation else {}
    return {
        n: node for n, node in unmatched_nodes(view).items() if node.sidecar and n not in inside
    }


def _held_off(
    view: JobView, seen: FirstSeen, *, now_s: float, policy: AgreePatience
) -> dict[str, float]:
    delayed = held_off(
        view, seen.since, now_s=now_s, patience=policy.patience, leavers=seen.leavers
    )
    if out := left_out(view):  # their time begins when they are reachable again
        delayed = {name: until_s for name, until_s in delayed.items() if name not in out}
    return delayed


def _changes(
    view: JobView, seen: FirstSeen, *, now_s: float, policy: AgreePatience
) -> tuple[list[str], float | None]:
    """Return the joins and departures possible now, as clauses, and since when.

    Or the time until which to wait.
    """
    joins, at_s = _joins(view, seen, now_s=now_s, policy=policy)
    away = moved_away(view)
    if not away or view.generation is None:
        return joins, at_s
    spec, left = _spec_of_generation(view), len(view.generation.members) - len(away)
    if choose_mesh(spec, trainers=left)[0] is None:
        return joins, at_s
    since_s = max(seen.since.get(incarnation, now_s) for incarnation in away)
    due_s = max(since_s, seen.number_s + policy.holdoff_s)
    if joins and at_s is not None:
        return [*joins, *away.values()], min(at_s, max(due_s, now_s))
    if now_s < due_s:
        return [], due_s if at_s is None else min(at_s, due_s)
    return list(away.values()), due_s


def _joins(
    view: JobView, seen: FirstSeen, *, now_s: float, policy: AgreePatience
) -> tuple[list[str], float | None]:
    """Return the joins possible now, as clauses, and since when.

    Or the time until which to wait.
    """
    delayed, out = _held_off(view, seen, now_s=now_s, policy=policy), left_out(view)
    absent = {*delayed, *out}
    trainers = [pair for pair in outside_trainers(view) if pair[0].node not in absent]
    if view.generation and trainers:
        members = len(view.generation.members)
        mesh, _ = choose_mesh(_spec_of_generation(view), trainers=members + len(trainers))
        if mesh is None or mesh.ranks <= members:
            trainers = []  # they are spares
    marks = strangers(view)
    nodes = [node for name, node in _outside_nodes(view).items() if name not in absent]
    if nodes:
        waiting = set(pending_trainers(view).values())
        nodes = [node for node in nodes if node.node not in waiting]
    ready_s = [seen.since.get(worker.incarnation, now_s) for _, worker in trainers]
    nodes_s = [_since_s(node, seen, mark=marks[node.node], now_s=now_s) for node in nodes]
    due_s = []
    if ready_s:
        settled_s = max(ready_s) + policy.join_settle_s
        due_s.append(min(settled_s, min(ready_s) + policy.join_settle_max_s))
    if nodes_s:
        due_s.append(max(nodes_s) + policy.node_settle_s)
    again_s = min(delayed.values(), default=None)
    if not due_s:
        return [], again_s
    until_s = max(min(due_s), seen.number_s + policy.holdoff_s)
    if now_s < until_s:
        return [], until_s if again_s is None else min(until_s, again_s)
    clauses = [f"{worker.seat} on {node.node} wants to join" for node, worker in trainers]
    return clauses + [f"node {node.node} wants to join" for node in nodes], until_s


def _since_s(node: NodeRecord, seen: FirstSeen, *, mark: str, now_s: float) -> float:
    """Return since when a node can join: its trainers may have started long after it came."""
    marks = [mark, *(worker.incarnation for worker in node.workers)]
    return max((seen.since[each] for each in marks if each in seen.since), default=now_s)


def _spec_of_generation(view: JobView) -> JobSpec:
    for member in view.generation.members if view.generation else ():
        home = view.nodes.get(member.node)
        worker = None if home is None else worker_of(home, member)
        if worker is not None and worker.spec is not None:
            return worker.spec
    return JobSpec()


@ahead()
@by_nodes(lambda view: (some_spec(view),))
def _asking_else(nodes: Iterable[NodeRecord], spec: JobSpec) -> dict[str, bool]:
    """Return the nodes with a worker whose spec differs from that of the first node."""
    return {
        node.node: True
        for node in nodes
        for worker in node.workers
        if worker.spec is not spec and worker.spec is not None and worker.spec != spec
    }


def _discord(view: JobView) -> str:
    """Return how the READY trainers disagree about the job, empty if they agree."""
    if not _asking_else(view):
        return ""
    ready = [(node, worker) for node, worker in ready_trainers(view) if worker.spec]
    for (first_node, first), (node, worker) in zip(ready[:1] * len(ready), ready, strict=True):
        if worker.spec != first.spec:
            return (
                f"{first.seat} on {first_node.node} asks for {first.spec} but {worker.seat} on "
                f"{node.node} for {worker.spec}: run the same script with the same settings "
                "everywhere"
            )
    return ""


def _first(
    view: JobView,
    seen: FirstSeen,
    *,
    node: str,
    now_s: float,
    policy: AgreePatience,
    points: RestorePoints | None,
) -> tuple[Decision, str]:
    """Decide before the first generation; wait for trainers and sidecars that are starting."""
    seated = [order for order in view.seating if role_of(order.seat) == TRAINER]
    workers = (view.worker_of(order) for order in seated)
    if seated and all(worker and worker.state is WorkerState.DONE for worker in workers):
        message = "every trainer has ended well without asking for a generation"
        return Finish(outcome=JobOutcome(ok=True, message=message)), message
    ready = ready_trainers(view)
    awaited = [f"the sidecar of {name}" for name in _without_sidecar(view)]
    if requested_spec(view).dp is None:
        awaited += pending_trainers(view)
    if ready and awaited:
        first_s = min(seen.since.get(worker.incarnation, now_s) for _, worker in ready)
        if now_s < first_s + policy.start_wait_s:
            why = f"{len(ready)} trainers are ready, {_names(awaited)} still starting"
            return WaitForFences(until_s=first_s + policy.start_wait_s), why
    return _gather(view, seen, node=node, now_s=now_s, policy=policy, points=points)


def _gather(
    view: JobView,
    seen: FirstSeen,
    *,
    node: str,
    now_s: float,
    policy: AgreePatience,
    points: RestorePoints | None,
) -> tuple[Decision, str]:
    """Decide once this node has fenced; wait for the others and for trainers, then propose."""
    if lagging := _unfenced(view, group=True):
        return WaitForFences(), f"waiting for {_names(lagging)} to fence generation {view.number}"
    delayed = _held_off(view, seen, now_s=now_s, policy=policy)
    quorum_s = now_s if seen.fenced_s is None else seen.fenced_s
    out = left_out(view)
    absent = {*delayed, *out}
    if newcomers := [name for name in _unfenced(view, group=False) if name not in absent]:
        until_s = quorum_s + policy.newcomer_wait_s
        if now_s < until_s:
            return WaitForFences(until_s=until_s), f"waiting for newcomers {_names(newcomers)}"
    if text := _discord(view):
        return Finish(outcome=JobOutcome(ok=False, message=text)), text
    ready = ready_trainers(view)
    if out:
        ready = [pair for pair in ready if pair[0].node not in out]
    least = requested_spec(view).least
    seats = view.wanted.get(TRAINER, 0)
    if ready and least > seats:
        text = f"the job needs {least} trainers but has only {seats} seats: start more trainers"
        return Finish(outcome=JobOutcome(ok=False, message=text)), text
    if len(ready) < least:
        return WaitForFences(), _shortage(view, ready=len(ready), least=least)
    if pending := _starting_together(view, ready):
        first_s = min(seen.since.get(worker.incarnation, now_s) for _, worker in ready)
        until_s = max(first_s, quorum_s) + policy.join_settle_max_s
        if now_s < until_s:
            return WaitForFences(
                until_s=until_s
            ), f"no trainer survived, {_names(pending)} still starting"
    if (turn := _turn(view, node)) is None:
        return WaitForFences(), "the deciders propose"
    turn_s = quorum_s + policy.stagger_s * turn
    if now_s < turn_s:
        return WaitForFences(until_s=turn_s), "another node proposes first"
    if len(view.nodes) >= MANY_NODES and seen.looks == 1:
        steps = weigh(view)
        return WaitForFences(until_s=now_s), f"{steps} steps can be restored; planning comes next"
    setbacks = setbacks_after(
        view, lived_s=now_s - seen.number_s, patience=policy.patience, leavers=seen.leavers
    )
    record, reason = plan(view, restore_points=points, excluded=delayed, setbacks=setbacks)
    return Propose(record=record, expected=view.generation_revision), reason


def _turn(view: JobView, node: str) -> int | None:
    """Return the number of nodes that propose before ``node``, None if it leaves that to others."""
    if deciders := living_deciders(view):
        nodes = [decider.node for decider in deciders.values()]
        return nodes.index(node) if node in nodes else None
    late = sum(name < node for name in late_nodes(view))
    return bisect_left(_names_in_order(view), node) - late


@once
def _names_in_order(view: JobView) -> list[str]:
    return sorted(view.nodes)


def _shortage(view: JobView, *, ready: int, least: int) -> str:
    """Return how many trainers are missing, where they are, and a remedy, as a clause."""
    text = f"{ready} of {least} trainers are ready, waiting for {least - ready} more"
    seats = [order for order in view.seating if role_of(order.seat) == TRAINER]
    where = []
    if pending := pending_trainers(view):
        where.append(f"{_names(pending)} starting")
    if unseated := [order.seat for order in seats if order.node not in view.nodes]:
        where.append(f"no free slot for {_names(unseated)}: start another node")
    if out := why_left_out(view):
        where.append(out)
    return f"{text} ({', '.join(where)})" if where else text


def _starting_together(
    view: JobView, ready: Sequence[tuple[NodeRecord, WorkerRecord]]
) -> list[str]:
    """Return the starting trainers if none survived: then all restarted at the same time.

    A world of only the first of them would end at once, when the next one joins.
    """
    old = member_incarnations(view)
    survived = any(worker.incarnation in old for _, worker in ready)
    if survived or view.generation is None or requested_spec(view).dp is not None:
        return []
    return list(pending_trainers(view))


def _names(names: Iterable[str]) -> str:
    few = list(islice(names, 9))
    return ", ".join(few) if len(few) <= 8 else f"{', '.join(few[:8])} and others"
