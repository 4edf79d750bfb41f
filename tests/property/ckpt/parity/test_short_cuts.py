"""Shortcuts of decisions in large worlds give the same result as the full computation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from unittest.mock import patch

import msgspec
from doubles import fakes
from doubles.strategies import views
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.memory.records import (
    BlockEntry,
    BlockSource,
    Inventory,
    RestorePoint,
    SnapshotWorld,
)
from holdfast.ckpt.parity.groups import form_groups
from holdfast.ckpt.parity.stripes import Geometry, plan_recovery, restore_points
from holdfast.elastic.decisions import agree, seating
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.planning.inventories import compact

briefly = settings(max_examples=examples(150), deadline=None)


@briefly
@given(views(), st.integers(-1, 3))
def test_a_seating_that_stands_is_the_one_that_would_be_made_anew(
    view: JobView, progress: int
) -> None:
    decision, _ = seating.seat(view, progress=progress)
    if isinstance(decision, seating.ChangeSeats):  # likely to stand, then
        view = fakes.view(
            *view.nodes.values(),
            generation=view.generation,
            seating=decision.seats,
            wanted=dict(view.wanted),
        )
    quick = seating.seat(view, progress=progress)
    with patch.object(seating, "_unchanged", lambda _: None):
        assert seating.seat(view, progress=progress) == quick


@st.composite
def told(draw: st.DrawFn) -> list[Inventory]:
    """Draw what the nodes that are left say, compact or not; some of it may contradict."""
    names = [f"n{number}" for number in range(draw(st.integers(2, 9)))]
    nodes = [fakes.node(name) for name in names]
    parity = draw(st.integers(0, 2))
    ranks = [(name, fakes.worker(f"trainer/{at}")) for at, name in enumerate(names)]
    record = fakes.generation(3, nodes, ranks=ranks, parity=min(parity, len(names) - 1))
    world = record.snapshots
    if draw(st.booleans()) and len(names) > 3 and world.parity == 1:
        half = len(names) // 2
        groups = (tuple(names[:half]), tuple(names[half:]))
        world = msgspec.structs.replace(world, groups=groups)
    found = []
    for name in draw(st.lists(st.sampled_from(names), unique=True, min_size=1)):
        inventory = fakes.inventory(name, world, *draw(st.sets(st.integers(0, 2))))
        if draw(st.booleans()):
            inventory = msgspec.structs.replace(compact(inventory, None), worlds=(world,))
        if inventory.sealed and draw(st.integers(0, 5)) == 0:
            wrong = msgspec.structs.replace(inventory.sealed[-1], index_crc32c=draw(st.just(9)))
            inventory = msgspec.structs.replace(inventory, sealed=(*inventory.sealed[:-1], wrong))
        if inventory.sealed and draw(st.integers(0, 5)) == 0:
            inventory = msgspec.structs.replace(inventory, spoiled=(inventory.sealed[0],))
        found.append(inventory)
    return found


@briefly
@given(told())
def test_restore_points_are_those_found_without_any_short_cut(inventories: list[Inventory]) -> None:
    points, reason = restore_points(inventories)
    expected, clauses = long_way(inventories)
    assert points == expected
    assert reason == clauses


def long_way(inventories: Sequence[Inventory]) -> tuple[list[RestorePoint], str]:
    """Find the restore points by hearing every word and laying out all groups."""
    worlds = {world.generation: world for each in inventories for world in each.worlds}
    heard = [
        (entry, None if said is each.sealed else each.node)
        for each in sorted(inventories, key=lambda each: each.node)
        for said in (each.sealed, each.blocks)
        for entry in said
        if entry.generation in worlds
    ]
    live = sorted(each.node for each in inventories)
    points: list[RestorePoint] = []
    clauses = []
    for key in sorted({(entry.generation, entry.step) for entry, _ in heard}, reverse=True):
        world = worlds[key[0]]
        about = [(e, who) for e, who in heard if (e.generation, e.step) == key]
        sources, why = long_sources(inventories, world, about, live)
        words = f"step {key[1]} of generation {key[0]}"
        if sources is None:
            clauses.append(f"{words} cannot be restored: {why}")
        else:
            if not points:
                clauses.append(f"{words}: {why}")
            points.append(RestorePoint(world=world, step=key[1], sources=tuple(sources)))
    return points, "; ".join(clauses) or f"no snapshot in the memory of nodes {live or 'none'}"


def long_sources(
    inventories: Sequence[Inventory],
    world: SnapshotWorld,
    heard: list[tuple[BlockEntry, str | None]],
    live: list[str],
) -> tuple[list[BlockSource] | None, str]:
    entries: dict[int, BlockEntry] = {}
    holders: dict[int, list[str]] = {}
    conflict = ""
    for entry, who in heard:
        known = entries.setdefault(entry.rank, entry)
        if known != entry:
            conflict = f"rank {entry.rank} was sealed twice, as {known} and {entry}"
        elif who is not None:
            holders.setdefault(entry.rank, []).append(who)
    ranks = range(len(world.rank_nodes))
    if conflict:
        return None, conflict
    if unknown := [rank for rank in ranks if rank not in entries]:
        return None, f"ranks {unknown} had not sealed it"
    missing = [rank for rank in ranks if rank not in holders]
    step = next(iter(entries.values())).step
    spoiled = {
        e.rank
        for each in inventories
        for e in each.spoiled
        if (e.generation, e.step) == (world.generation, step)
    }
    geometry = Geometry(world, entries)
    rows = {
        (p.stripe, p.row): each.node
        for each in inventories
        for p in each.parities
        if (p.generation, p.step) == (world.generation, step)
        and p.nbytes == geometry.row_bytes(p.stripe)
    }
    for rank in missing:
        if rank in spoiled:
            return None, f"the block of rank {rank}, rebuilt from parity, failed its checksum"
        first = {known: nodes[0] for known, nodes in holders.items()}
        plan, reason = plan_recovery(geometry, rank, holders=first, rows=rows)
        if plan is None:
            home = world.rank_nodes[rank]
            return None, f"the block of rank {rank} (node {home}) is gone and {reason}"
    load = dict.fromkeys(live, 0)
    sources = []
    for rank in ranks:
        if rank in holders:
            home = world.rank_nodes[rank]
            node = home if home in holders[rank] else min(holders[rank])
        else:
            node = min(live, key=lambda name: (load[name], name))
            load[node] += -(-entries[rank].payload_bytes // 8) * 8 + entries[rank].index_bytes
        sources.append(BlockSource(rank=rank, node=node, rebuilt=rank in missing))
    if not missing:
        return sources, "every rank's block is in memory"
    where = ", ".join(f"rank {s.rank} on {s.node}" for s in sources if s.rebuilt)
    return sources, f"every rank's block is in memory or rebuilt from parity ({where})"


@briefly
@given(st.lists(st.integers(0, 5), min_size=4, max_size=60), st.integers(1, 2), st.data())
def test_groups_that_were_kept_stay_level_over_every_domain(
    racks: list[int], parity: int, data: st.DataObject
) -> None:
    domains = {f"n{at:02}": f"rack{rack}" for at, rack in enumerate(racks)}
    groups, _ = form_groups(domains, parity=parity, size=4)
    for _ in range(3):
        lost = data.draw(st.sets(st.sampled_from(sorted(domains)), max_size=3))
        domains = {name: rack for name, rack in domains.items() if name not in lost}
        domains[f"m{len(domains):02}"] = "rack0"
        if len(domains) <= parity + 1:
            return
        groups, _ = form_groups(domains, parity=parity, size=4, previous=groups)
        for rack in set(domains.values()):
            total = sum(each == rack for each in domains.values())
            fair = -(-total // len(groups))
            assert max(sum(domains[n] == rack for n in group) for group in groups) <= fair


@briefly
@given(views(plannable=True))
def test_a_large_world_is_weighed_in_one_look_and_planned_in_the_next_to_the_same_end(
    view: JobView,
) -> None:
    node = min(view.nodes, default="nobody")
    seen = agree.observe(view, agree.FirstSeen(), now_s=0.0)
    at_once, _ = agree.decide(view, seen, node=node, now_s=0.0)
    with patch.object(agree, "MANY_NODES", 0):
        first, _ = agree.decide(view, seen, node=node, now_s=0.0)
        after = dataclasses.replace(view)  # nothing that the first look found is at hand
        again = agree.observe(after, seen, now_s=0.0)
        second, _ = agree.decide(after, again, node=node, now_s=0.0)
    assert second == at_once
    assert first == (
        agree.WaitForFences(until_s=0.0) if isinstance(at_once, agree.Propose) else at_once
    )
