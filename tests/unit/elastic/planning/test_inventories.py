"""Published inventories: small for each node, and together equivalent to whole ones."""

from __future__ import annotations

import msgspec
from doubles import fakes

from holdfast.ckpt.parity.stripes import restore_points
from holdfast.elastic.membership.records import GenerationRecord
from holdfast.elastic.planning.inventories import compact, known_worlds, whole

NAMES = "abcdefgh"


def eight_nodes() -> GenerationRecord:
    nodes = [fakes.node(name) for name in NAMES]
    ranks = [(name, fakes.worker(f"trainer/{name}")) for name in NAMES]
    record = fakes.generation(3, nodes, ranks=ranks)
    groups = (("a", "c", "e", "g"), ("b", "d", "f", "h"))
    return msgspec.structs.replace(
        record, snapshots=msgspec.structs.replace(record.snapshots, groups=groups)
    )


def test_node_publishes_the_blocks_of_its_parity_group_and_no_known_group() -> None:
    record = eight_nodes()
    found = compact(fakes.inventory("c", record.snapshots, 5, 6), record)
    assert found.worlds == ()
    assert {entry.rank for entry in found.sealed} == {0, 2, 4, 6}
    assert [entry.rank for entry in found.blocks] == [2, 2]


def test_group_that_no_record_names_is_published() -> None:
    record = eight_nodes()
    inventory = fakes.inventory("c", record.snapshots, 5)
    assert compact(inventory, None).worlds == (record.snapshots,)
    other = msgspec.structs.replace(record.snapshots, keep=1)
    changed = msgspec.structs.replace(record, snapshots=other)
    assert compact(inventory, changed).worlds == (record.snapshots,)


def test_groups_of_restore_points_are_known_too() -> None:
    old = eight_nodes()
    point = fakes.held(old.snapshots, 5)
    later = msgspec.structs.replace(
        old.snapshots, generation=4, rank_nodes=old.snapshots.rank_nodes[:4]
    )
    record = msgspec.structs.replace(old, number=4, snapshots=later, fallbacks=(point,))
    assert set(known_worlds(record)) == {3, 4}
    assert compact(fakes.inventory("a", old.snapshots, 5), record).worlds == ()


def test_compact_inventories_restore_what_whole_ones_do() -> None:
    record = eight_nodes()
    for lost in ("", "a", "ab", "gh", "ac", "aceg"):
        full = [fakes.inventory(n, record.snapshots, 5, 6) for n in NAMES if n not in lost]
        small = [compact(inventory, record) for inventory in full]
        points, _ = restore_points(full)
        assert restore_points(whole(small, record))[0] == points
    assert whole([], record) == []
