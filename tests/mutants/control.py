"""Bugs of the control plane, found by the simulator in small jobs under random faults.

The trial is a run of `holdfast.elastic.testing`: a drawn job, drawn faults, and the invariants of
an oracle that knows the true state.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from doubles.drawing import draw_config

from holdfast.ckpt.memory.records import Inventory, RestorePoint
from holdfast.ckpt.parity.stripes import BlockRecovery, Geometry
from holdfast.ckpt.sidecar.core.book import (
    Book,
    CommitSnapshot,
    Instruction,
    Progress,
    Protect,
    Snapshot,
    SnapshotPhase,
)
from holdfast.elastic.membership.incremental import by_node
from holdfast.elastic.membership.records import GenerationRecord, NodeRecord, WorkerState
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.testing.simulation.simulator import Simulation
from holdfast.elastic.testing.simulation.training import InvariantError
from holdfast.tools.chaos.scenarios.scenario import parse
from holdfast.tools.chaos.scenarios.strikes import draw
from holdfast.tools.chaos.simulated.world import judge, simulate
from mutants.bug import Bug


def trial(seed: int) -> str:
    """Run the job of a seed under its faults; return the invariant that was broken, or ""."""
    try:
        report = Simulation(draw_config(seed), seed=seed).run()
    except InvariantError as error:
        return str(error).rpartition("\n")[2].strip()
    return "" if report.outcome.ok else f"the job failed: {report.outcome.message}"


def scenario_trial(seed: int) -> str:
    """Lose a machine for good, and a worker, in a job that needs all of its workers."""
    draw_from = random.Random(f"planted scenario {seed}")
    planted = {
        "name": "lost-for-good",
        "about": "the others have room for what a lost machine ran",
        "workload": {
            "command": ["train"],
            "nodes": {n: {"trainer": 2} for n in "abc"},
            "wanted": {"trainer": 3},
        },
        "simulated": {"steps": 30, "dp": 3},
        "checks": {"dense": True, "undone_most": 4},
        "lifetime_s": 60.0,
        "fault": [
            {"kind": "lose", "when": {"step": draw_from.randint(2, 12)}},
            {"kind": "kill", "when": {"step": draw_from.randint(14, 24)}},
        ],
    }
    scenario = parse(planted, source="planted")
    hurt = simulate(scenario, draw(scenario, seed=seed), seed=seed)
    calm = simulate(scenario, (), seed=seed)
    verdict = judge(scenario, hurt, calm=calm)
    wrong = [f"{each.check}: {each.message}" for each in verdict.violations]
    return next((each.rpartition("\n")[2].strip() for each in (*hurt.problems, *wrong)), "")


# -- agreement -------------------------------------------------------------------------------------


def _waits_for_no_fence(_real: Any) -> Any:
    return lambda view, *, group: []


def _counts_the_fence_before(_real: Any) -> Any:
    @by_node(lambda view: (view.generation,))
    def late_nodes(node: NodeRecord, generation: GenerationRecord | None) -> NodeRecord | None:
        return node if generation is not None and node.fenced < generation.number - 1 else None

    return late_nodes


def _sees_no_dead_member(_real: Any) -> Any:
    return lambda view: {}


def _takes_who_is_still_starting(real: Callable[..., Any]) -> Any:
    def parked(node: NodeRecord, orders: Any) -> Any:
        workers = tuple(
            msgspec.structs.replace(worker, state=WorkerState.READY)
            if worker.state is WorkerState.STARTING
            else worker
            for worker in node.workers
        )
        return real(msgspec.structs.replace(node, workers=workers), orders)

    return parked


def _takes_a_new_sidecar_for_the_old(_real: Any) -> Any:
    return lambda record: record.incarnation


def _counts_the_dead(real: Callable[[JobView], Mapping[str, NodeRecord]]) -> Any:
    known: dict[str, NodeRecord] = {}

    def fenced_nodes(view: JobView) -> Mapping[str, NodeRecord]:
        if view.number == 0:
            known.clear()  # another job
        known.update(real(view))
        return dict(sorted(known.items()))

    return fenced_nodes


def _leaves_seats_on_lost_nodes(_real: Any) -> Any:
    return lambda view: set()


# -- restores --------------------------------------------------------------------------------------


def _forgets_what_was_rolled_back(_real: Any) -> Any:
    return lambda generation, *, step, timeline: True


def _restores_the_oldest(real: Callable[..., tuple[list[RestorePoint], str]]) -> Any:
    def choose_restore(view: JobView, **more: Any) -> tuple[list[RestorePoint], str]:
        points, why = real(view, **more)
        return points[::-1], why

    return choose_restore


def _trusts_an_old_inventory(real: Callable[..., Inventory]) -> Any:
    """Publish the inventory of the previous fence instead of the new one."""
    before: dict[str, Inventory] = {}

    def newest(inventory: Inventory) -> int:
        return max((world.generation for world in inventory.worlds), default=0)

    def compact(inventory: Inventory, record: GenerationRecord | None) -> Inventory:
        old = before.get(inventory.node, inventory)
        before[inventory.node] = inventory
        if newest(old) > newest(inventory):
            old = inventory  # that of another job
        return real(old, record)

    return compact


def _leaves_out_its_own_group(_real: Any) -> Any:
    def compact(inventory: Inventory, record: GenerationRecord | None) -> Inventory:
        mine = {entry.rank for entry in inventory.blocks}
        kept = tuple(entry for entry in inventory.sealed if entry.rank in mine)
        return msgspec.structs.replace(inventory, sealed=kept)

    return compact


def _forgets_the_groups(_real: Any) -> Any:
    return lambda inventories, record: list(inventories)


def _needs_a_fragment_less(real: Callable[..., Any]) -> Any:
    """Plan the rebuild with one parity row more than there is."""

    def plan_recovery(
        geometry: Geometry,
        rank: int,
        *,
        holders: Mapping[int, str],
        rows: Mapping[tuple[int, int], str],
    ) -> tuple[tuple[BlockRecovery, ...] | None, str]:
        places = {
            (stripe, row)
            for stripe, *_ in geometry.pieces_of_block(rank)
            for row in range(geometry.m)
        }
        more = dict.fromkeys(sorted(places - rows.keys())[:1], geometry.nodes[0])
        return real(geometry, rank, holders=holders, rows={**rows, **more})  # type: ignore[no-any-return]

    return plan_recovery


def _checks_no_fragments(_real: Any) -> Any:
    return lambda remains, missing: ""


# -- snapshots -------------------------------------------------------------------------------------


def _is_protected_a_row_early(_real: Any) -> Any:
    def advance(self: Snapshot) -> list[Instruction]:
        done: list[Instruction] = []
        if self.phase is SnapshotPhase.SEALING and len(self.entries) == len(self.world.rank_nodes):
            self._move(Progress.ALL_SEALED)
            done.append(CommitSnapshot(snapshot=self))
        wanted = len(self.world.peers) * self.world.parity
        if self.phase is SnapshotPhase.COMMITTED and len(self.rows) >= wanted - 1:
            self._move(Progress.ALL_PARITY)
            done.append(Protect(snapshot=self))
        return done

    return advance


def _is_committed_a_rank_early(real: Callable[[Snapshot], list[Instruction]]) -> Any:
    def advance(self: Snapshot) -> list[Instruction]:
        if (
            self.phase is SnapshotPhase.SEALING
            and len(self.entries) == len(self.world.rank_nodes) - 1
        ):
            self._move(Progress.ALL_SEALED)
            return [CommitSnapshot(snapshot=self), *real(self)]
        return real(self)

    return advance


def _keeps_one_too_few(real: Callable[[Book], list[Instruction]]) -> Any:
    def retain(self: Book) -> list[Instruction]:
        world = self.world
        if world is None or world.keep > 1:
            return real(self)
        mine = [
            key for key, each in self.snapshots.items() if each.phase is SnapshotPhase.PROTECTED
        ]
        return [*real(self), *(self._forget(key) for key in mine if key in self.snapshots)]

    return retain


def _drops_what_is_restored(_real: Any) -> Any:
    return lambda snapshot, restore: False


def _takes_blocks_after_its_inventory(_real: Any) -> Any:
    return lambda self: None


def _accepts_an_old_generation(real: Callable[..., Any]) -> Any:
    def require(self: Book, generation: int) -> Any:
        return self.world if 0 < generation < self.generation else real(self, generation)

    return require


# -- the coordinator -------------------------------------------------------------------------------


def _sets_without_comparing(_real: Any) -> Any:
    def compare_and_set(
        self: Any, key: str, value: str, *, expected: int, lease: int | None = None
    ) -> bool:
        self.put(key, value, lease=lease)
        return True

    return compare_and_set


def _keeps_leases_for_ever(_real: Any) -> Any:
    return lambda self, now_s: []


def _bug(
    name: str,
    about: str,
    where: str,
    broken: Callable[[Any], Any],
    seed: int,
    *,
    trial: str = "control",
) -> Bug:
    return Bug(name=name, about=about, where=where, broken=broken, trial=trial, seed=seed)


BUGS: Final = (
    _bug(
        "fence-forgotten",
        "a generation is proposed before the others have fenced",
        "holdfast.elastic.decisions.agree:_unfenced",
        _waits_for_no_fence,
        10,
    ),
    _bug(
        "old-fence-counts",
        "the fence of the previous generation counts as a fence of this one",
        "holdfast.elastic.membership.readiness:late_nodes",
        _counts_the_fence_before,
        0,
    ),
    _bug(
        "death-unseen",
        "the death of a member does not end its generation",
        "holdfast.elastic.decisions.validity:_lost_members",
        _sees_no_dead_member,
        18,
    ),
    _bug(
        "not-ready",
        "a worker that is still starting becomes a rank",
        "holdfast.elastic.membership.readiness:_parked",
        _takes_who_is_still_starting,
        0,
    ),
    _bug(
        "sidecar-mistaken",
        "a restarted, empty sidecar is taken for its predecessor",
        "holdfast.elastic.membership.view:identity",
        _takes_a_new_sidecar_for_the_old,
        38,
    ),
    _bug(
        "dead-votes",
        "the planner counts lost nodes and their snapshots",
        "holdfast.elastic.membership.readiness:fenced_nodes",
        _counts_the_dead,
        7,
    ),
    _bug(
        "seats-stay",
        "the seats of lost nodes are not reassigned",
        "holdfast.elastic.decisions.seating:_away",
        _leaves_seats_on_lost_nodes,
        0,
        trial="scenario",
    ),
    _bug(
        "rolled-back-future",
        "snapshots of rolled-back steps are restored",
        "holdfast.elastic.planning.plan:on_timeline",
        _forgets_what_was_rolled_back,
        374,
    ),
    _bug(
        "oldest-restored",
        "the oldest restore point is chosen instead of the newest",
        "holdfast.elastic.planning.plan:choose_restore",
        _restores_the_oldest,
        0,
    ),
    _bug(
        "stale-inventory",
        "a node publishes the inventory of the previous fence",
        "holdfast.elastic.planning.inventories:compact",
        _trusts_an_old_inventory,
        0,
    ),
    _bug(
        "shape-forgotten",
        "an inventory omits the blocks of the other nodes in its parity group",
        "holdfast.elastic.planning.inventories:compact",
        _leaves_out_its_own_group,
        7,
    ),
    _bug(
        "groups-forgotten",
        "the planner does not add the groups that inventories omit",
        "holdfast.elastic.planning.inventories:whole",
        _forgets_the_groups,
        0,
    ),
    _bug(
        "fragment-too-few",
        "one fragment less than needed counts as enough to rebuild",
        "holdfast.ckpt.parity.stripes:plan_recovery",
        _needs_a_fragment_less,
        7,
    ),
    _bug(
        "fragments-uncounted",
        "the planner promises a lost block without counting its fragments",
        "holdfast.ckpt.parity.stripes:_unrecoverable",
        _checks_no_fragments,
        0,
    ),
    _bug(
        "parity-early",
        "a snapshot is protected before its last parity row is sealed",
        "holdfast.ckpt.sidecar.core.book:Snapshot.advance",
        _is_protected_a_row_early,
        401,
    ),
    _bug(
        "committed-early",
        "a snapshot is committed before the index of every rank has arrived",
        "holdfast.ckpt.sidecar.core.book:Snapshot.advance",
        _is_committed_a_rank_early,
        0,
    ),
    _bug(
        "retained-too-few",
        "with keep = 1 no snapshot is kept",
        "holdfast.ckpt.sidecar.core.book:Book._retain",
        _keeps_one_too_few,
        2,
    ),
    _bug(
        "restored-dropped",
        "the snapshot that a generation resumes from is released at its start",
        "holdfast.ckpt.sidecar.core.book:_survives",
        _drops_what_is_restored,
        39,
    ),
    _bug(
        "inventory-open",
        "blocks are accepted after the inventory",
        "holdfast.ckpt.sidecar.core.book:Book.close",
        _takes_blocks_after_its_inventory,
        512,
    ),
    _bug(
        "old-generation",
        "a sidecar accepts messages of an ended generation",
        "holdfast.ckpt.sidecar.core.book:Book.require",
        _accepts_an_old_generation,
        247,
    ),
    _bug(
        "set-uncompared",
        "a compare-and-set does not compare",
        "holdfast.elastic.coordinator.memory:KeyValueTable.compare_and_set",
        _sets_without_comparing,
        5,
    ),
    _bug(
        "lease-endless",
        "leases never expire",
        "holdfast.elastic.coordinator.memory:KeyValueTable.expire",
        _keeps_leases_for_ever,
        0,
        trial="scenario",
    ),
)
