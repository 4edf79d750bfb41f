"""The plan: ranks, the group, the restore point on the surviving timeline, the reason."""

from __future__ import annotations

import msgspec
import pytest
from doubles import fakes

from holdfast.ckpt.memory.records import BlockSource
from holdfast.elastic.membership.records import (
    GenerationRecord,
    JobSpec,
    NodeRecord,
    Origin,
    WorkerRecord,
)
from holdfast.elastic.membership.view import JobView, identity
from holdfast.elastic.planning.plan import MAX_TIMELINE, extend_timeline, on_timeline, plan


def trainer(number: int, *, attempt: int = 1, spec: JobSpec | None = None) -> WorkerRecord:
    return fakes.worker(f"trainer/{number}", attempt=attempt, spec=spec)


def three_nodes() -> GenerationRecord:
    """Generation 3: trainer/0 on a is rank 0, trainer/1 on b is rank 1, c holds no rank."""
    nodes = [fakes.node("a"), fakes.node("b"), fakes.node("c")]
    return fakes.generation(3, nodes, ranks=[("a", trainer(0)), ("b", trainer(1))])


def seats(view: JobView) -> list[tuple[str, str]]:
    return [(member.node, member.seat) for member in plan(view)[0].members]


def test_first_generation_takes_ranks_by_seat() -> None:
    view = fakes.view(
        fakes.node("a", trainer(2), trainer(10)),
        fakes.node("b", trainer(0)),
        fakes.node("c"),
        wanted={"trainer": 3},
    )
    record, reason = plan(view)
    assert record.number == 1
    assert [(m.rank, m.seat) for m in record.members] == [
        (0, "trainer/0"),
        (1, "trainer/2"),
        (2, "trainer/10"),
    ]
    assert [peer.node for peer in record.snapshots.peers] == ["a", "b", "c"]
    assert record.snapshots.rank_nodes == ("b", "a", "a")
    assert (record.snapshots.parity, record.restore) == (1, None)
    assert record.nodes == {name: identity(node) for name, node in view.nodes.items()}
    assert record.reason == reason
    assert reason == (
        "generation 1: 3 of 3 trainers (b/trainer/0 new, a/trainer/2 new, a/trainer/10 new); "
        "1 parity group of 3 nodes, any 1 may be lost; nothing to restore yet"
    )


def test_node_lost_and_its_seat_taken_elsewhere() -> None:
    old = three_nodes()
    view = fakes.view(
        fakes.node(
            "a", trainer(0), fenced=3, inventory=fakes.inventory("a", old.snapshots, 16, 17)
        ),
        fakes.node(
            "c", trainer(1, attempt=2), fenced=3, inventory=fakes.inventory("c", old.snapshots, 17)
        ),
        generation=old,
    )
    record, reason = plan(view)
    assert record.number == 4
    assert record.snapshots.rank_nodes == ("a", "c")
    assert record.restore is not None
    assert record.restore.step == 17
    assert record.restore.sources[0] == BlockSource(rank=0, node="a")
    assert record.restore.sources[1].rebuilt
    rebuilder = record.restore.sources[1].node
    assert reason == (
        "generation 4: 2 of 2 trainers (a/trainer/0 kept, c/trainer/1 new); node b was lost; "
        "1 parity group of 2 nodes, any 1 may be lost; restores step 17 of generation 3: "
        "rank 0 from node a's arena, "
        f"rank 1 rebuilt on {rebuilder} from parity, 1001 of 2001 bytes move"
    )


def test_survivors_keep_their_ranks_when_the_size_stays() -> None:
    old = three_nodes()
    view = fakes.view(
        fakes.node("b", trainer(1), fenced=3),
        fakes.node("c", trainer(0, attempt=2), fenced=3),
        generation=old,
    )
    assert seats(view) == [("c", "trainer/0"), ("b", "trainer/1")]


def test_newcomer_takes_the_rank_whose_block_is_on_its_node() -> None:
    nodes = [fakes.node(name) for name in "abcd"]
    old = fakes.generation(3, nodes, ranks=[(n, trainer(i)) for i, n in enumerate("abcd")])
    view = fakes.view(
        fakes.node("a", trainer(0), fenced=3),
        fakes.node("c", trainer(1, attempt=2), fenced=3),
        fakes.node("d", trainer(3), fenced=3),
        fakes.node("e", trainer(2, attempt=2), fenced=3),
        generation=old,
    )
    assert seats(view) == [
        ("a", "trainer/0"),
        ("e", "trainer/2"),
        ("c", "trainer/1"),
        ("d", "trainer/3"),
    ]


def test_survivors_keep_their_order_when_the_size_changes() -> None:
    old = three_nodes()
    view = fakes.view(
        fakes.node("a", trainer(0), trainer(3), fenced=3),
        fakes.node("b", trainer(1), fenced=3),
        generation=old,
    )
    assert seats(view) == [("a", "trainer/0"), ("b", "trainer/1"), ("a", "trainer/3")]
    fewer = fakes.view(fakes.node("b", trainer(1), fenced=3), generation=old)
    assert seats(fewer) == [("b", "trainer/1")]


def test_fixed_size_leaves_spares_and_prefers_members() -> None:
    spec = JobSpec(dp=2)
    old = three_nodes()
    view = fakes.view(
        fakes.node("a", trainer(0, spec=spec), fenced=3),
        fakes.node("b", trainer(1, spec=spec), fenced=3),
        fakes.node("c", fakes.worker("trainer/2", incarnation="new", spec=spec), fenced=3),
        generation=old,
    )
    assert seats(view) == [("a", "trainer/0"), ("b", "trainer/1")]


def test_group_is_the_fenced_nodes_with_a_sidecar() -> None:
    view = fakes.view(
        fakes.node("a", trainer(0), fenced=3),
        fakes.node("b", trainer(1), fenced=3, sidecar=False),
        fakes.node("c", trainer(2), fenced=0),
        generation=three_nodes(),
    )
    record, reason = plan(view)
    assert [peer.node for peer in record.snapshots.peers] == ["a"]
    assert record.snapshots.parity == 0
    assert [member.seat for member in record.members] == ["trainer/0"]
    assert "the sidecar of node b is down" in reason
    assert "parity 1 was asked, 1 nodes allow 0" in reason


def test_reason_says_why_nothing_can_be_restored() -> None:
    old = three_nodes()
    view = fakes.view(
        fakes.node("c", trainer(0, attempt=2), fenced=3,
                   inventory=fakes.inventory("c", old.snapshots, 17)),
        generation=old,
    )  # fmt: skip
    record, reason = plan(view)
    assert record.restore is None
    assert "node a was lost; node b was lost" in reason
    assert "restores nothing from memory: the newest checkpoint is loaded" in reason
    assert "step 17 of generation 3 cannot be restored" in reason


def saying(worker: WorkerRecord, *, replicated_bytes: int) -> WorkerRecord:
    return msgspec.structs.replace(worker, info={"replicated_bytes": replicated_bytes})


def test_what_replicas_read_of_each_other_is_said_as_well() -> None:
    old = three_nodes()
    survivor = saying(trainer(0), replicated_bytes=2000)
    view = fakes.view(
        fakes.node("a", survivor, fenced=3, inventory=fakes.inventory("a", old.snapshots, 17)),
        fakes.node("b", trainer(1), fenced=3, inventory=fakes.inventory("b", old.snapshots, 17)),
        generation=old,
    )
    assert plan(view)[1].endswith(
        "0 of 2001 bytes move, and about 2000 more so that every replica has what is replicated"
    )


def test_replicas_on_one_node_read_from_its_memory() -> None:
    nodes = [fakes.node("a"), fakes.node("b"), fakes.node("c")]
    ranks = [("a", trainer(0)), ("a", trainer(1)), ("b", trainer(2)), ("b", trainer(3))]
    old = fakes.generation(3, nodes, ranks=ranks)
    both = [saying(trainer(0), replicated_bytes=4000), trainer(1)]
    view = fakes.view(
        fakes.node("a", *both, fenced=3, inventory=fakes.inventory("a", old.snapshots, 17)),
        fakes.node(
            "b", trainer(2), trainer(3), fenced=3, inventory=fakes.inventory("b", old.snapshots, 17)
        ),
        generation=old,
    )
    # each of the four has two parts of 1000 on its node, and needs the other two
    assert "0 of 4006 bytes move, and about 8000 more" in plan(view)[1]


def test_one_replica_needs_nothing_of_others() -> None:
    old = three_nodes()
    survivor = saying(trainer(0), replicated_bytes=2000)
    inventory = fakes.inventory("a", old.snapshots, 17)
    other = fakes.node("c", fenced=3, inventory=fakes.inventory("c", old.snapshots, 17))
    view = fakes.view(
        fakes.node("a", survivor, fenced=3, inventory=inventory), other, generation=old
    )
    assert plan(view)[1].endswith("about 1001 of 2001 bytes move")


def test_resharding_is_said() -> None:
    old = three_nodes()
    view = fakes.view(
        *(
            fakes.node(name, *workers, fenced=3, inventory=fakes.inventory(name, old.snapshots, 9))
            for name, workers in (("a", [trainer(0)]), ("b", []), ("c", []))
        ),
        generation=old,
    )
    assert plan(view)[1].endswith("resharded from 2 ranks to 1, about 1001 of 2001 bytes move")


def away_and_back(*, restored: int | None) -> tuple[GenerationRecord, str]:
    """Generation 3 saved step 20; generation 4 went on from ``restored``; now all are back."""
    third = three_nodes()
    point = fakes.held(third.snapshots, restored) if restored is not None else None
    timeline = extend_timeline(
        third.timeline, Origin(generation=4, step=-1 if restored is None else restored)
    )
    fourth = fakes.generation(
        4, [fakes.node("a")], ranks=[("a", trainer(0))], restore=point, timeline=timeline
    )
    view = fakes.view(
        *(
            fakes.node(n, *w, fenced=4, inventory=fakes.inventory(n, third.snapshots, 18, 20))
            for n, w in (("a", [trainer(0)]), ("b", [trainer(1)]), ("c", []))
        ),
        generation=fourth,
    )
    return plan(view)


def test_snapshot_of_a_rolled_back_future_is_not_restored() -> None:
    record, _ = away_and_back(restored=18)
    assert record.restore is not None
    assert (record.restore.step, record.restore.world.generation) == (18, 3)


def test_second_failure_restores_the_same_step_again() -> None:
    record, _ = away_and_back(restored=20)
    assert record.restore is not None
    assert record.restore.step == 20


def test_nothing_older_counts_after_a_start_from_the_checkpoint() -> None:
    record, reason = away_and_back(restored=None)
    assert record.restore is None
    assert "step 20 of generation 3 belongs to a future that was rolled back" in reason
    assert record.timeline == (Origin(generation=5, step=-1),)


CLAUSE = "a newer checkpoint comes first, if there is one"


def behind(
    *steps_of_fourth: int, durable: int = -1, at_most: int | None = None, before: int | None = None
) -> tuple[GenerationRecord, GenerationRecord, str]:
    """Generation 4 went on from step 20 of generation 3, and holds other steps now.

    A node knows of the checkpoint ``durable``. Trainers ask to roll back to ``at_most``. Generation
    4 itself had to look for a checkpoint on the timeline until ``before``.
    """
    third = three_nodes()
    fourth = fakes.generation(
        4,
        [fakes.node(name) for name in "abc"],
        ranks=[("a", trainer(0)), ("b", trainer(1))],
        restore=fakes.held(third.snapshots, 20),
        timeline=extend_timeline(third.timeline, Origin(generation=4, step=20)),
    )
    if before is not None:
        known = (Origin(generation=2, step=before),)
        fourth = msgspec.structs.replace(fourth, before=known)
    held, steps = (fourth, steps_of_fourth) if steps_of_fourth else (third, (18, 20))
    asked = {} if at_most is None else {"restore_at_most": at_most}
    workers = {"a": [trainer(0)], "b": [trainer(1)], "c": []}
    view = fakes.view(
        *(
            fakes.node(
                name,
                *(msgspec.structs.replace(w, ready_after=4, info=asked) for w in found),
                fenced=4,
                inventory=msgspec.structs.replace(
                    fakes.inventory(name, held.snapshots, *steps), durable=durable
                ),
            )
            for name, found in workers.items()
        ),
        generation=fourth,
    )
    record, reason = plan(view)
    return record, fourth, reason


def test_a_newer_checkpoint_comes_first_if_nothing_of_the_newest_generation_is_left() -> None:
    record, fourth, reason = behind()
    assert record.restore is not None and record.restore.step == 20
    assert record.before == fourth.timeline
    assert reason.endswith(f"; {CLAUSE}")


def test_a_newer_checkpoint_comes_first_if_a_node_knows_of_one() -> None:
    record, fourth, reason = behind(25, 26, durable=30)
    assert record.restore is not None and record.restore.step == 26
    assert record.before == fourth.timeline and CLAUSE in reason


@pytest.mark.parametrize("durable", [-1, 25, 26])
def test_no_checkpoint_is_looked_for_if_memory_has_the_newest_step(durable: int) -> None:
    record, _, reason = behind(25, 26, durable=durable)
    assert record.restore is not None and record.restore.step == 26
    assert record.before == () and CLAUSE not in reason


def test_no_checkpoint_is_newer_than_a_roll_back() -> None:
    record, _, _ = behind(25, 26, durable=30, at_most=25)
    assert record.restore is not None and record.restore.step == 25
    assert record.before == ()


def test_a_generation_that_came_to_nothing_leaves_the_timeline_of_its_search() -> None:
    record, fourth, _ = behind(before=50)
    assert record.before == fourth.before == (Origin(generation=2, step=50),)
    record, fourth, _ = behind(25, 26, durable=30, before=50)
    assert record.before == fourth.timeline, "generation 4 went on, and what it left is no more"


def timeline_of(*steps: int) -> tuple[Origin, ...]:
    timeline: tuple[Origin, ...] = ()
    for number, step in enumerate(steps, 1):
        timeline = extend_timeline(timeline, Origin(generation=number, step=step))
    return timeline


def test_timeline_keeps_only_what_still_says_something() -> None:
    assert [o.generation for o in timeline_of(-1, 5, 9, 9, 7, 12)] == [1, 2, 5, 6]


@pytest.mark.parametrize(
    ("generation", "step", "valid"),
    [(6, 99, True), (5, 12, True), (5, 13, False), (4, 7, True), (4, 8, False), (1, 5, True),
     (1, 6, False)],
)  # fmt: skip
def test_snapshot_counts_up_to_the_least_later_origin(
    generation: int, step: int, valid: bool
) -> None:
    timeline = timeline_of(-1, 5, 9, 9, 7, 12)
    assert on_timeline(generation, step=step, timeline=timeline) is valid


def test_timeline_is_bounded_and_disowns_what_it_forgets() -> None:
    timeline = timeline_of(*range(-1, 200))
    assert len(timeline) == MAX_TIMELINE
    oldest = timeline[0].generation
    assert not on_timeline(oldest - 1, step=0, timeline=timeline)
    assert on_timeline(oldest, step=oldest - 1, timeline=timeline)


def labelled(name: str, domain: str, *workers: WorkerRecord, fenced: int = 0) -> NodeRecord:
    return msgspec.structs.replace(fakes.node(name, *workers, fenced=fenced), domain=domain)


def test_nodes_guard_each_other_in_groups_over_their_domains() -> None:
    spec = JobSpec(parity_group=2, memory_bytes=1 << 30)
    nodes = [
        labelled("a", "left", trainer(0, spec=spec)),
        labelled("b", "left"),
        labelled("c", "right"),
        labelled("d", "right"),
    ]
    record, reason = plan(fakes.view(*nodes))
    assert record.snapshots.groups == (("a", "c"), ("b", "d"))
    assert [peer.domain for peer in record.snapshots.peers] == ["left", "left", "right", "right"]
    assert (record.snapshots.columns, record.snapshots.memory_bytes) == (0, 1 << 30)
    assert (
        "2 parity groups of 2 nodes, any 1 of each may be lost; losing a whole domain is survived"
        in reason
    )


def test_groups_stay_as_they_are_when_others_join() -> None:
    spec = JobSpec(parity_group=2)
    nodes = [labelled(name, name, fenced=1) for name in "abcd"]
    nodes[0] = labelled("a", "a", trainer(0, spec=spec), fenced=1)
    old = fakes.generation(1, nodes, ranks=[("a", trainer(0))])
    kept = (("a", "d"), ("b", "c"))
    old = msgspec.structs.replace(
        old, snapshots=msgspec.structs.replace(old.snapshots, groups=kept)
    )
    joined = labelled("e", "e", fenced=1)
    record, _ = plan(fakes.view(*nodes, joined, generation=old))
    assert {frozenset(group) for group in record.snapshots.groups} == {
        frozenset("ade"),
        frozenset("bc"),
    }


def test_replicas_need_one_column_and_another_node() -> None:
    spec = JobSpec(parity=1, columns=1)
    record, _ = plan(fakes.view(fakes.node("a", trainer(0, spec=spec)), fakes.node("b")))
    assert (record.snapshots.parity, record.snapshots.columns) == (1, 1)
    alone, reason = plan(fakes.view(fakes.node("a", trainer(0, spec=spec))))
    assert (alone.snapshots.parity, alone.snapshots.columns) == (0, 0)
    assert "parity 1 was asked, 1 nodes allow 0: no parity: the memory of a lost node" in reason
