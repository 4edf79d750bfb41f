"""Meshes and cells: sizes of the axes, whole groups, ranks near their bytes."""

from __future__ import annotations

import msgspec
import pytest
from doubles import fakes

from holdfast.elastic.membership.records import (
    GenerationRecord,
    JobSpec,
    MeshSize,
    NodeRecord,
    WorkerRecord,
)
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.planning.holdings import BlockHoldings, saved_mesh
from holdfast.elastic.planning.meshes import choose_mesh, coordinates, rank_of
from holdfast.elastic.planning.placing import Placer, form_cells
from holdfast.elastic.planning.plan import plan


def trainers(count: int, *, first: int = 0, spec: JobSpec | None = None) -> list[WorkerRecord]:
    return [fakes.worker(f"trainer/{first + number}", spec=spec) for number in range(count)]


def labelled(record: NodeRecord, domain: str) -> NodeRecord:
    return msgspec.structs.replace(record, domain=domain)


@pytest.mark.parametrize(
    ("spec", "count", "expected"),
    [
        (JobSpec(), 5, MeshSize(dp=5)),
        (JobSpec(max_dp=3), 5, MeshSize(dp=3)),
        (JobSpec(tp=(4,)), 11, MeshSize(dp=2, tp=4)),
        (JobSpec(tp=(2,), pp=(3,)), 13, MeshSize(dp=2, tp=2, pp=3)),
        (JobSpec(ep=(4,)), 11, MeshSize(dp=8, ep=4)),
        (JobSpec(shard=(4, 2)), 9, MeshSize(dp=8, shard=4)),
        (JobSpec(shard=(4, 2)), 6, MeshSize(dp=6, shard=2)),
        (JobSpec(shard=(2,), tp=(2,)), 7, MeshSize(dp=2, tp=2, shard=2)),
        (JobSpec(shard=(4,), ep=(2,)), 11, MeshSize(dp=8, ep=2, shard=4)),
        (JobSpec(shard=(4, 2), ep=(4, 2)), 7, MeshSize(dp=6, ep=2, shard=2)),
        (JobSpec(ep=(2, 1)), 3, MeshSize(dp=3)),
        (JobSpec(ep=(2, 1)), 5, MeshSize(dp=4, ep=2)),
        (JobSpec(shard=(2,)), 1, None),
        (JobSpec(dp=2, tp=(8, 4)), 16, MeshSize(dp=2, tp=8)),
        (JobSpec(dp=2, tp=(8, 4)), 15, MeshSize(dp=2, tp=4)),
        (JobSpec(tp=(8, 4)), 12, MeshSize(dp=3, tp=4)),
        (JobSpec(tp=(8, 4)), 20, MeshSize(dp=2, tp=8)),
        (JobSpec(tp=(4,), min_dp=2), 7, None),
    ],
)
def test_mesh_follows_preferences_and_uses_the_trainers(
    spec: JobSpec, count: int, expected: MeshSize | None
) -> None:
    mesh, reason = choose_mesh(spec, trainers=count)
    assert mesh == expected
    assert reason


def test_why_a_preference_was_passed_over_is_said() -> None:
    _, reason = choose_mesh(JobSpec(tp=(8, 4)), trainers=12)
    assert reason == "mesh dp 3 × tp 4, 3 groups of 4 ranks (dp 1 × tp 8 would use 8)"


def test_least_and_most_count_trainers() -> None:
    spec = JobSpec(min_dp=2, max_dp=6, tp=(4, 2), pp=(2,), ep=(1, 2))
    assert (spec.least, spec.most) == (8, 48)
    assert JobSpec(dp=3).least == JobSpec(dp=3).most == 3
    assert JobSpec().most is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tp": ()}, "tp is"),
        ({"pp": (2, 2)}, "pp is"),
        ({"dp": 3, "ep": (2,)}, "no multiple of an accepted ep"),
        ({"dp": 3, "shard": (2,)}, "no multiple of an accepted shard"),
        ({"shard": (4, 2), "ep": (3,)}, "no accepted ep .* divides an accepted shard"),
        ({"max_dp": 1, "min_dp": 2}, "max_dp is 1, at least 2"),
        ({"microbatches": -1}, "microbatches is -1"),
    ],
)
def test_contradictory_specification_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobSpec(**wrong)  # type: ignore[arg-type]


def test_ranks_and_coordinates_are_one_to_one() -> None:
    mesh = MeshSize(dp=3, tp=2, pp=4)
    places = [coordinates(rank, mesh) for rank in range(mesh.ranks)]
    assert [rank_of(place, mesh) for place in places] == list(range(24))
    assert {place.dp for place in places[:8]} == {0}


def test_cells_lie_inside_nodes_then_inside_domains() -> None:
    nodes = [
        labelled(fakes.node("a", *trainers(3)), "left"),
        labelled(fakes.node("b", *trainers(3, first=3)), "right"),
        labelled(fakes.node("c", *trainers(1, first=6)), "left"),
        labelled(fakes.node("d", *trainers(1, first=7)), "right"),
    ]
    pairs = [(node, worker) for node in nodes for worker in node.workers]
    cells = [{node.node for node, _ in cell} for cell in form_cells(pairs, size=2)]
    assert cells == [{"a"}, {"b"}, {"a", "c"}, {"b", "d"}]


def test_cells_lie_inside_wider_domains_before_they_cross_them() -> None:
    labels = {"a": "row0/rack0", "b": "row1/rack2", "c": "row0/rack1", "d": "row1/rack2"}
    nodes = [
        labelled(fakes.node(name, *trainers(1, first=at)), label)
        for at, (name, label) in enumerate(labels.items())
    ]
    pairs = [(node, worker) for node in nodes for worker in node.workers]
    cells = [{node.node for node, _ in cell} for cell in form_cells(pairs, size=2)]
    assert cells == [{"b", "d"}, {"a", "c"}]


def test_cell_crosses_domains_only_where_nothing_else_is_left() -> None:
    nodes = [labelled(fakes.node(n, *trainers(1, first=i)), n) for i, n in enumerate("abc")]
    pairs = [(node, worker) for node in nodes for worker in node.workers]
    assert [len(cell) for cell in form_cells(pairs, size=2)] == [2]


def test_the_ranks_of_a_replica_lie_on_one_node_and_leave_together() -> None:
    spec = JobSpec(shard=(2,), parity=1)
    nodes = [fakes.node(n, *trainers(2, first=2 * i, spec=spec)) for i, n in enumerate("abc")]
    old, reason = plan(fakes.view(*nodes, wanted={"trainer": 6}))
    assert "mesh dp 6 (replicate 3 × shard 2), 3 groups of 2 ranks, 3 of 3 groups within" in reason
    left = [
        fakes.node(
            node.node,
            *(msgspec.structs.replace(worker, ready_after=1) for worker in node.workers[at:]),
            fenced=1,
            inventory=fakes.inventory(node.node, old.snapshots, 5),
        )
        for node, at in zip(nodes, (0, 1, 0), strict=True)
    ]
    record, reason = plan(fakes.view(*left, generation=old, wanted={"trainer": 6}))
    assert record.mesh == MeshSize(dp=4, shard=2)
    assert [member.node for member in record.members] == ["a", "a", "c", "c"]
    assert "1 trainer spare" in reason


def test_ranks_with_the_experts_between_them_lie_on_one_node_and_leave_together() -> None:
    spec = JobSpec(ep=(2,), parity=1)
    nodes = [fakes.node(n, *trainers(2, first=2 * i, spec=spec)) for i, n in enumerate("abc")]
    old, reason = plan(fakes.view(*nodes, wanted={"trainer": 6}))
    assert "mesh dp 6 × ep 2, 3 groups of 2 ranks, 3 of 3 groups within" in reason
    left = [
        fakes.node(
            node.node,
            *(msgspec.structs.replace(worker, ready_after=1) for worker in node.workers[at:]),
            fenced=1,
            inventory=fakes.inventory(node.node, old.snapshots, 5),
        )
        for node, at in zip(nodes, (0, 1, 0), strict=True)
    ]
    record, reason = plan(fakes.view(*left, generation=old, wanted={"trainer": 6}))
    assert record.mesh == MeshSize(dp=4, ep=2)
    assert [member.node for member in record.members] == ["a", "a", "c", "c"]
    assert "1 trainer spare" in reason


def test_the_sizes_along_the_axes_of_a_device_mesh() -> None:
    mesh = MeshSize(dp=6, tp=2, shard=3)
    assert mesh.along(("dp", "tp")) == (6, 2)
    assert mesh.along(("replicate", "shard", "tp")) == (2, 3, 2)
    assert (mesh.cell, mesh.near, mesh.ranks) == (2, 6, 12)
    experts = MeshSize(dp=8, tp=2, ep=2)
    assert experts.along(("edp", "ep", "tp")) == (4, 2, 2)
    assert experts.near == 4
    both = MeshSize(dp=8, ep=2, shard=4)
    assert both.along(("replicate", "edp", "ep")) == (2, 2, 2)
    assert both.near == 4
    with pytest.raises(ValueError, match="shard 4 is no multiple of ep 3"):
        MeshSize(dp=12, ep=3, shard=4)


def meshed(number: int, view: JobView, mesh: MeshSize) -> GenerationRecord:
    record, _ = plan(view)
    assert record.mesh == mesh
    return msgspec.structs.replace(record, number=number)


def test_survivors_of_a_lost_node_keep_their_groups_and_no_byte_moves_twice() -> None:
    spec = JobSpec(tp=(2,), parity=1)
    nodes = [fakes.node(n, *trainers(2, first=2 * i, spec=spec)) for i, n in enumerate("abcd")]
    old, reason = plan(fakes.view(*nodes, wanted={"trainer": 8}))
    assert old.mesh == MeshSize(dp=4, tp=2)
    assert "mesh dp 4 × tp 2, 4 groups of 2 ranks, 4 of 4 groups within a node" in reason
    survivors = [
        fakes.node(
            node.node,
            *(msgspec.structs.replace(worker, ready_after=1) for worker in node.workers),
            fenced=1,
            inventory=fakes.inventory(node.node, old.snapshots, 5),
        )
        for node in nodes
        if node.node != "b"
    ]
    record, reason = plan(fakes.view(*survivors, generation=old, wanted={"trainer": 8}))
    assert record.mesh == MeshSize(dp=3, tp=2)
    assert [member.node for member in record.members] == ["a", "a", "c", "c", "d", "d"]
    whole = sum(1000 + rank for rank in range(8))
    # of thirds of the state, nodes a and d hold quarters inside theirs; c holds two twelfths
    assert f"resharded from 8 ranks to 6, about {moved_of(reason)} of {whole} bytes move" in reason
    assert moved_of(reason) == pytest.approx(whole * (1 / 12 + 1 / 6 + 1 / 12), rel=0.01)


def moved_of(reason: str) -> int:
    return int(reason.split("about ")[1].split(" of ", maxsplit=1)[0])


def test_newcomer_takes_the_place_whose_bytes_its_node_has() -> None:
    spec = JobSpec(tp=(2,), parity=1)
    nodes = [fakes.node(n, *trainers(2, first=2 * i, spec=spec)) for i, n in enumerate("abc")]
    old, _ = plan(fakes.view(*nodes, wanted={"trainer": 6}))
    again = [
        fakes.node(
            node.node,
            *(
                msgspec.structs.replace(worker, ready_after=1, incarnation=f"new {worker.seat}")
                for worker in reversed(node.workers)
            ),
            fenced=1,
            inventory=fakes.inventory(node.node, old.snapshots, 5),
        )
        for node in reversed(nodes)
    ]
    record, reason = plan(fakes.view(*again, generation=old, wanted={"trainer": 6}))
    assert [member.node for member in record.members] == ["a", "a", "b", "b", "c", "c"]
    assert reason.endswith(f"0 of {sum(1000 + rank for rank in range(6))} bytes move")


def test_overlap_of_every_axis_counts() -> None:
    saved, wanted = MeshSize(dp=2, tp=2), MeshSize(dp=1, tp=4)
    names = "abcd"
    nodes = [fakes.node(name) for name in names]
    old = fakes.generation(1, nodes, ranks=[(n, fakes.worker(f"trainer/{n}")) for n in names])
    there = {n: fakes.node(n, inventory=fakes.inventory(n, old.snapshots, 5)) for n in names}
    point = fakes.held(old.snapshots, 5)
    holdings = BlockHoldings(point, nodes=there, saved=saved, mesh=wanted)
    eighth = holdings.total_bytes / 8
    # rank 0 saved one half of the rows of the left half of the columns
    assert dict(holdings.of("a")) == pytest.approx({0: eighth, 1: eighth}, rel=0.01)
    assert dict(holdings.of("d")) == pytest.approx({2: eighth, 3: eighth}, rel=0.01)
    assert holdings.moved(0, node="a") == pytest.approx(eighth, rel=0.01)
    assert holdings.moved(0, node="d") == pytest.approx(2 * eighth, rel=0.01), "a quarter"
    assert saved_mesh(point, known={1: saved}) == saved
    assert saved_mesh(point, known={}) == MeshSize(dp=4)


def test_trainers_beyond_the_most_are_spares() -> None:
    spec = JobSpec(max_dp=2)
    nodes = [fakes.node(n, *trainers(1, first=i, spec=spec)) for i, n in enumerate("abc")]
    record, reason = plan(fakes.view(*nodes, wanted={"trainer": 3}))
    assert [member.node for member in record.members] == ["a", "b"]
    assert "2 of 2 trainers" in reason
    assert "1 trainer spare" in reason


def test_microbatches_follow_the_measured_speeds() -> None:
    spec = JobSpec(microbatches=12)
    slow, fast = (
        msgspec.structs.replace(worker, speed=speed)
        for worker, speed in zip(trainers(2, spec=spec), (1.0, 2.0), strict=True)
    )
    record, reason = plan(fakes.view(fakes.node("a", slow), fakes.node("b", fast)))
    assert record.shares == (4, 8)
    assert "shares of 4 to 8 microbatches by measured speed" in reason
    unmeasured = trainers(2, spec=spec)
    record, _ = plan(fakes.view(fakes.node("a", unmeasured[0]), fakes.node("b", unmeasured[1])))
    assert record.shares == ()


def test_those_who_share_experts_share_their_speed() -> None:
    spec = JobSpec(microbatches=12, ep=(2,))
    speeds = (1.0, 4.0, 2.0, 2.0)
    ready = [
        msgspec.structs.replace(worker, speed=speed)
        for worker, speed in zip(trainers(4, spec=spec), speeds, strict=True)
    ]
    record, _ = plan(fakes.view(fakes.node("a", *ready[:2]), fakes.node("b", *ready[2:])))
    assert record.shares == (2, 2, 4, 4)


def test_ranks_that_are_about_equally_fast_share_evenly_and_nothing_is_said_of_it() -> None:
    spec = JobSpec(microbatches=12)
    ready = [
        msgspec.structs.replace(worker, speed=speed)
        for worker, speed in zip(trainers(2, spec=spec), (1.0, 1.02), strict=True)
    ]
    record, reason = plan(fakes.view(fakes.node("a", *ready)))
    assert record.shares == ()
    assert "shares" not in reason


def test_placer_needs_no_history() -> None:
    node = fakes.node("a", *trainers(2))
    placed = Placer(MeshSize(dp=2), old=None, holdings=None).place(
        [(node, worker) for worker in reversed(node.workers)]
    )
    assert [worker.seat for _, worker in placed.ranks] == ["trainer/0", "trainer/1"]
