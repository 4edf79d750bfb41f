"""The difference between a record of all nodes and the one before it. Pure.

A generation names all members, nodes, parity groups and sources of blocks, and mostly few of them
differ from those of the generation before. So a node that has that one needs to read only the
difference, of a size that does not grow with the job. The same holds for the seating.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import msgspec

from holdfast.ckpt.memory.records import BlockSource, RestorePoint, SidecarPeer, SnapshotWorld
from holdfast.ckpt.types import learn
from holdfast.elastic.membership.records import (
    GenerationRecord,
    Member,
    MeshSize,
    Origin,
    Seating,
    Setback,
)
from holdfast.elastic.membership.stretches import Stretch, joined, stretches

Divisible: TypeAlias = GenerationRecord | tuple[Seating, ...]
"""The records that name all nodes."""

_LISTS = ("peers", "rank_nodes", "groups")


class WorldDifference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A `SnapshotWorld` beside another one; ``others`` are its differing fields of one value."""

    peers: tuple[Stretch[SidecarPeer], ...]
    rank_nodes: tuple[Stretch[str], ...]
    groups: tuple[Stretch[tuple[str, ...]], ...]
    others: dict[str, int | str] = {}


class PointDifference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A restore point: the number of its world, its step, and the sources that are not as usual.

    Usually the block of a rank is at the rank's node. ``lost`` are the ranks without a source.
    """

    world: int
    step: int
    elsewhere: tuple[BlockSource, ...] = ()
    lost: tuple[int, ...] = ()


class GenerationDifference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A `GenerationRecord` beside the one before it.

    Worlds are numbered: first those of the earlier record (`_worlds_of`), then ``worlds``, of which
    the first is that of the new generation. ``shares`` and ``setbacks`` are None if they are as
    before. A rank is a member's place.
    """

    number: int
    reason: str
    mesh: MeshSize
    members: tuple[Stretch[Member], ...]
    nodes: tuple[Stretch[tuple[str, str]], ...]
    worlds: tuple[WorldDifference, ...]
    restore: PointDifference | None = None
    fallbacks: tuple[PointDifference, ...] = ()
    before: tuple[Origin, ...] = ()
    timeline: tuple[Origin, ...] = ()
    shares: tuple[int, ...] | None = None
    setbacks: dict[str, Setback] | None = None


def difference_text(record: Divisible, before: Divisible) -> str | None:
    """Return the JSON from which `with_difference` makes ``record``; None if there is none."""
    found: object
    if isinstance(record, GenerationRecord):
        if not isinstance(before, GenerationRecord):
            return None
        found = generation_difference(record, before)
    else:
        found = stretches(cast("tuple[Seating, ...]", before), record, key=lambda each: each.seat)
    text = msgspec.json.encode(found).decode()
    return text if with_difference(text, before) == record else None


def with_difference(text: str | bytes, before: Divisible) -> Divisible:
    """Return the record that differs so from the one before it.

    Raises ``ValueError`` if ``text`` is no difference from that record.
    """
    if isinstance(before, GenerationRecord):
        found = msgspec.json.decode(text, type=GenerationDifference)
        return generation_with(found, before)
    seats = msgspec.json.decode(text, type=tuple[Stretch[Seating], ...])
    return tuple(joined(before, seats))


def generation_difference(
    record: GenerationRecord, before: GenerationRecord
) -> GenerationDifference:
    """Return the difference between a generation and the one before it."""
    known = [*_worlds_of(before), record.snapshots]
    news = len(known) - 1

    def point(each: RestorePoint) -> PointDifference:
        number = next((n for n, world in enumerate(known) if world == each.world), len(known))
        if number == len(known):
            known.append(each.world)
        return _point_difference(each, world=number)

    restore = None if record.restore is None else point(record.restore)
    fallbacks = tuple(point(each) for each in record.fallbacks)
    return GenerationDifference(
        number=record.number,
        reason=record.reason,
        mesh=record.mesh,
        members=stretches(
            before.members, record.members, key=lambda each: each.incarnation, same=_same_worker
        ),
        nodes=stretches(tuple(before.nodes.items()), tuple(record.nodes.items())),
        worlds=tuple(_world_difference(each, before.snapshots) for each in known[news:]),
        restore=restore,
        fallbacks=fallbacks,
        before=record.before,
        timeline=record.timeline,
        shares=None if record.shares == before.shares else record.shares,
        setbacks=None if record.setbacks == before.setbacks else record.setbacks,
    )


def generation_with(found: GenerationDifference, before: GenerationRecord) -> GenerationRecord:
    """Return the generation that differs so from the one before it. Raises ``ValueError``."""
    worlds = _worlds_of(before)
    news = len(worlds)
    worlds += [_world_with(each, before.snapshots) for each in found.worlds]
    usual: dict[int, list[BlockSource]] = {}

    def point(each: PointDifference) -> RestorePoint:
        if not 0 <= each.world < len(worlds):
            raise ValueError(f"world {each.world} of {len(worlds)}")
        world = worlds[each.world]
        if each.world not in usual:
            usual[each.world] = _usual_sources(world)
        sources = _sources(usual[each.world], each)
        return RestorePoint(world=world, step=each.step, sources=sources)

    if len(worlds) == news:
        raise ValueError("a generation without a world")
    return GenerationRecord(
        number=found.number,
        members=tuple(_ranked(joined(before.members, found.members))),
        snapshots=worlds[news],
        restore=None if found.restore is None else point(found.restore),
        reason=found.reason,
        fallbacks=tuple(point(each) for each in found.fallbacks),
        before=found.before,
        nodes=dict(joined(tuple(before.nodes.items()), found.nodes)),
        timeline=found.timeline,
        mesh=found.mesh,
        shares=before.shares if found.shares is None else found.shares,
        setbacks=before.setbacks if found.setbacks is None else found.setbacks,
    )


def _worlds_of(record: GenerationRecord) -> list[SnapshotWorld]:
    """Return the worlds that a record names: its own, then those of its restore points."""
    points = [*([] if record.restore is None else [record.restore]), *record.fallbacks]
    found = [record.snapshots]
    for point in points:
        if all(point.world != world for world in found):
            found.append(point.world)
    return found


def _same_worker(one: Member, other: Member) -> bool:
    """Return whether two members are equal but for their ranks."""
    return (
        one.incarnation == other.incarnation
        and one.seat == other.seat
        and one.node == other.node
        and one.info == other.info
    )


def _ranked(members: Sequence[Member]) -> list[Member]:
    return [
        member
        if member.rank == rank
        else Member(
            rank=rank,
            seat=member.seat,
            node=member.node,
            incarnation=member.incarnation,
            info=member.info,
        )
        for rank, member in enumerate(members)
    ]


def _world_difference(world: SnapshotWorld, like: SnapshotWorld) -> WorldDifference:
    return WorldDifference(
        peers=stretches(like.peers, world.peers, key=lambda each: each.node),
        rank_nodes=stretches(like.rank_nodes, world.rank_nodes),
        groups=stretches(like.groups, world.groups),
        others={
            name: value
            for name in world.__struct_fields__
            if name not in _LISTS and (value := getattr(world, name)) != getattr(like, name)
        },
    )


def _world_with(found: WorldDifference, like: SnapshotWorld) -> SnapshotWorld:
    known = set(like.__struct_fields__) - set(_LISTS)
    for name, value in found.others.items():
        if name not in known or type(value) is not type(getattr(like, name)):
            raise ValueError(f"a world with {name} = {value!r}")
    return msgspec.structs.replace(
        like,
        peers=tuple(joined(like.peers, found.peers)),
        rank_nodes=tuple(joined(like.rank_nodes, found.rank_nodes)),
        groups=tuple(joined(like.groups, found.groups)),
        **found.others,
    )


def _usual_sources(world: SnapshotWorld) -> list[BlockSource]:
    return [BlockSource(rank=rank, node=node) for rank, node in enumerate(world.rank_nodes)]


def _point_difference(point: RestorePoint, *, world: int) -> PointDifference:
    homes = point.world.rank_nodes
    return PointDifference(
        world=world,
        step=point.step,
        elsewhere=tuple(
            source
            for source in point.sources
            if source.rebuilt or source.rank >= len(homes) or homes[source.rank] != source.node
        ),
        lost=point.lost,
    )


def _sources(usual: Sequence[BlockSource], found: PointDifference) -> tuple[BlockSource, ...]:
    sources: list[BlockSource | None] = list(usual)
    for rank in (*(each.rank for each in found.elsewhere), *found.lost):
        if not 0 <= rank < len(sources):
            raise ValueError(f"rank {rank} of {len(sources)}")
    for each in found.elsewhere:
        sources[each.rank] = each
    for rank in found.lost:
        sources[rank] = None
    return tuple(each for each in sources if each is not None)


learn(globals())
