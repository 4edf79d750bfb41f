"""A sidecar's answers: sealing, protection, fencing, reading, logs, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from doubles.blocks import make_block, make_world, random_payload, write_block
from sidecar_group import (
    DEADLINE_S,
    SIZES,
    SidecarGroup,
    inventories,
    sidecar_group,
    write_step,
)

from holdfast.ckpt.checkpoints.assemble import Assembler
from holdfast.ckpt.checkpoints.catalog import load_manifest, step_folder
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import (
    CapacityError,
    CkptError,
    CorruptError,
    FencedError,
    NotFoundError,
    PeerError,
)
from holdfast.ckpt.geometry.shard_index import decode_index
from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.block import block_bytes
from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.memory.records import BlockSource
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.native.sums import sums_of
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.testing.shards import make_index
from holdfast.ckpt.transport import RunKey

BIG_BYTES = 20 << 20


@pytest.fixture
def one(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", threads=True) as group:
        yield group


@pytest.fixture
def three(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c", threads=True) as group:
        yield group


def test_a_block_comes_back_by_mapping_and_over_the_wire(one: SidecarGroup) -> None:
    world = one.adopt(keep=1)
    client = one.clients["a"]
    payload = write_step(one, world, 1, sizes=(BIG_BYTES,))[0]
    point = client.locate(generation=None, step=1)
    assert point.sources == (BlockSource(rank=0, node="a"),)
    handle = client.open_block(point.world, point.step, point.sources[0])
    slot = SlotFile.open(handle.path)
    assert bytes(slot.block(handle.payload_bytes)) == payload
    assert decode_index(handle.index, origin="here").payload_bytes == len(payload)
    ranges = [(5, 7), (0, BIG_BYTES), (100, 0)]
    parts = client.read(world, 1, 0, ranges)
    assert [bytes(part) for part in parts] == [payload[at : at + n] for at, n in ranges]


def test_slots_are_reused_and_waiting_for_one_ends(one: SidecarGroup) -> None:
    world = one.adopt(keep=1)
    client = one.clients["a"]
    paths = set()
    for step in range(8):
        write_step(one, world, step, sizes=(1000,))
        paths.add(client.open_block(world, step, BlockSource(rank=0, node="a")).path)
    assert len(paths) <= 3
    for step in (8, 9):
        client.acquire(generation=1, step=step, rank=0, size_bytes=10, timeout_s=5)
    with pytest.raises(CapacityError, match=r"no slot became free within 0\.1 s"):
        client.acquire(generation=1, step=10, rank=0, size_bytes=10, timeout_s=0.1)


def test_shared_memory_without_room_is_said_with_the_remedy(one: SidecarGroup) -> None:
    one.adopt()
    with pytest.raises(CapacityError, match="keep fewer"):
        one.clients["a"].acquire(generation=1, step=1, rank=0, size_bytes=1 << 45, timeout_s=5)


def test_bytes_that_are_not_what_the_index_says_are_not_sealed(one: SidecarGroup) -> None:
    one.adopt()
    client = one.clients["a"]
    payload = random_payload(1000, seed=(1,))
    index = make_index(payload, run=one.run, generation=1, step=1, rank=0, world_size=1)
    grant = client.acquire(generation=1, step=1, rank=0, size_bytes=5000, timeout_s=5)
    slot = SlotFile.open(grant.path)
    slot.block(1000)[:] = payload
    slot.block(1000)[500] ^= 1
    with pytest.raises(CorruptError, match="w0 fails its checksum"):
        client.seal(slot_id=grant.slot_id, entry=slot.finish(index))
    assert client.status()["counters"]["seals_refused"] == 1
    assert client.protected_step(generation=1) == -1


def test_sums_that_are_not_those_of_the_block_are_not_sealed(one: SidecarGroup) -> None:
    world, client = one.adopt(), one.clients["a"]
    payload = random_payload(300_000, seed=(1,))
    for step, changed in ((1, True), (2, False)):
        index = make_index(payload, run=one.run, generation=1, step=step, rank=0, world_size=1)
        grant = client.acquire(generation=1, step=step, rank=0, size_bytes=400_000, timeout_s=5)
        slot = SlotFile.open(grant.path)
        slot.block(len(payload))[:] = payload
        entry = slot.finish(index)
        sums = sums_of(slot.block(block_bytes(entry)))
        if changed:
            for wrong in (sums[:-1], sums ^ 1):
                with pytest.raises(CkptError):
                    client.seal(slot_id=grant.slot_id, entry=entry, sums=wrong)
            continue
        client.seal(slot_id=grant.slot_id, entry=entry, sums=sums)
    assert client.status()["counters"]["seals_refused"] == 1
    assert client.protected_step(generation=1) == 2
    assert client.read(world, 2, 0, [(7, 9)])[0] == payload[7:16]


def test_who_asks_before_the_generation_is_adopted_waits_for_it(one: SidecarGroup) -> None:
    one.adopt(generation=1)
    client = one.clients["a"]
    for timeout_s in (0.0, 0.05):
        with pytest.raises(NotFoundError, match="generation 2 is not known here yet"):
            client.protected_step(generation=2, timeout_s=timeout_s)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.protected_step, generation=2, at_least=7, timeout_s=60)
        with pytest.raises(TimeoutError):
            future.result(timeout=0.1)
        write_step(one, one.adopt(generation=2), 7)
        assert future.result(timeout=60) == 7


def test_an_older_generation_is_refused_everywhere(one: SidecarGroup) -> None:
    old = one.adopt(generation=3)
    client = one.clients["a"]
    grant = client.acquire(generation=3, step=1, rank=0, size_bytes=5000, timeout_s=5)
    one.adopt(generation=4)
    assert not Path(grant.path).exists()  # a stale writer's slot is never given to anybody
    write_step(one, one.adopt(generation=4), 1)
    with pytest.raises(FencedError, match="generation 3 is over"):
        client.acquire(generation=3, step=2, rank=0, size_bytes=10, timeout_s=5)
    entry, _ = make_block(b"late", generation=3)
    with pytest.raises(FencedError):
        client.seal(slot_id=grant.slot_id, entry=entry)
    with pytest.raises(FencedError):
        client.protected_step(generation=3)
    with pytest.raises(FencedError):
        client.adopt(old, restore=None)


def test_nobody_without_the_key_gets_an_answer(one: SidecarGroup) -> None:
    stranger = RunKey.new()
    forged = msgspec.structs.replace(stranger, server_public=one.key.server_public)
    for key in (stranger, forged):
        client = SidecarClient(one.addresses()["a"], key, timeout_s=0.3)
        with pytest.raises(PeerError, match="no answer"):
            client.status()
        client.close()
    assert one.clients["a"].status()["node"] == "a"


def test_a_malformed_request_is_refused_by_name(one: SidecarGroup) -> None:
    with pytest.raises(PeerError, match="acquire: malformed request"):
        one.clients["a"].call("acquire")
    with pytest.raises(NotFoundError, match="no operation 'dance'"):
        one.clients["a"].call("dance")


def test_two_of_four_nodes_may_go_and_the_new_group_is_protected_again(tmp_path: Path) -> None:
    with sidecar_group(tmp_path, "a", "b", "c", "d", threads=True) as group:
        world = group.adopt(rank_nodes=("a", "a", "b", "c"), parity=2)
        sizes = (40_000, 9_000, 55_001, 1)
        payloads = write_step(group, world, 5, sizes=sizes)
        group.kill("a", wipe=True)
        group.kill("c", wipe=True)
        point = restore_points(inventories(group))[0][0]
        after = group.adopt(rank_nodes=("b", "d"), parity=1, generation=2, restore=point)
        for source in point.sources:
            client = group.clients[source.node]
            client.open_block(point.world, 5, source)
            (part,) = client.read(point.world, 5, source.rank, [(0, sizes[source.rank])])
            assert part == payloads[source.rank]
        write_step(group, after, 5, sizes=(50_000, 60_000))
        for client in group.clients.values():  # what is superseded is gone
            assert [s["generation"] for s in client.status()["snapshots"]] == [2]


def test_a_node_may_go_after_all_sidecars_were_started_again(three: SidecarGroup) -> None:
    world = three.adopt(keep=1)
    write_step(three, world, 1)
    payloads = write_step(three, world, 2)
    for node in ("a", "b", "c"):
        three.kill(node, wipe=False)
    three.start("a", "b", "c")
    three.kill("c", wipe=True)
    point = restore_points(inventories(three))[0][0]
    assert point.step == 2
    source = point.sources[2]
    assert source.rebuilt
    client = three.clients[source.node]
    client.adopt(
        make_world(three.addresses(), run=three.run, rank_nodes=("a", "b"), generation=2, parity=1),
        restore=point,
    )
    client.open_block(point.world, 2, source)
    (part,) = client.read(point.world, 2, 2, [(0, SIZES[2])])
    assert part == payloads[2]


def test_too_many_lost_nodes_fall_back_with_the_reason(three: SidecarGroup) -> None:
    write_step(three, three.adopt(), 1)
    three.kill("b", wipe=True)
    three.kill("c", wipe=True)
    points, reason = restore_points(inventories(three))
    assert points == []
    assert "the block of rank 1 (node b) is gone" in reason


def test_a_block_that_a_reader_distrusts_is_looked_at_and_rebuilt(three: SidecarGroup) -> None:
    world = three.adopt()
    payloads = write_step(three, world, 1)
    handle = three.clients["b"].open_block(world, 1, BlockSource(rank=1, node="b"))
    with Path(handle.path).open("r+b") as file:
        file.seek(HEADER_BYTES + 17_000)
        byte = file.read(1)
        file.seek(HEADER_BYTES + 17_000)
        file.write(bytes([byte[0] ^ 4]))
    client = three.clients["b"]
    assert not three.clients["a"].distrust(world, 1, 0)
    assert client.distrust(world, 1, 1)
    assert client.status()["counters"]["corrupt_blocks"] == 1
    point = restore_points(inventories(three))[0][0]
    assert point.sources[1].rebuilt
    client = three.clients[point.sources[1].node]
    client.open_block(world, 1, point.sources[1])
    assert client.read(world, 1, 1, [(0, SIZES[1])])[0] == payloads[1]


def test_a_dead_peer_stops_protection_but_nothing_else(three: SidecarGroup) -> None:
    world = three.adopt(keep=1)
    write_step(three, world, 1)
    three.kill("c", wipe=True)
    for rank, node in ((0, "a"), (1, "b")):
        write_block(three.clients[node], world, step=2, rank=rank, nbytes=SIZES[rank])
    assert three.clients["a"].protected_step(generation=1, at_least=2, timeout_s=0.2) == 1
    point = restore_points(inventories(three))[0][0]
    assert point.step == 1
    after = three.adopt(rank_nodes=("a", "b"), generation=2, restore=point)
    write_step(three, after, 2, sizes=SIZES[:2])


def test_a_step_that_one_rank_gives_up_frees_the_others(three: SidecarGroup) -> None:
    world = three.adopt(keep=1)
    for step in range(1, 7):
        for rank, node in enumerate(world.rank_nodes[:2]):
            write_block(three.clients[node], world, step=step, rank=rank, nbytes=1000)
        client = three.clients["c"]
        grant = client.acquire(generation=1, step=step, rank=2, size_bytes=1000, timeout_s=5)
        client.abandon(grant.slot_id)
    write_step(three, world, 7)


def test_a_checkpoint_is_written_by_all_and_committed_once(three: SidecarGroup) -> None:
    world = three.adopt()
    root = three.directory / "checkpoints"
    for rank, node in enumerate(world.rank_nodes):
        write_block(
            three.clients[node],
            world,
            step=3,
            rank=rank,
            nbytes=1000,
            persist=CheckpointTarget(root=str(root)),
        )
    for client in three.clients.values():
        assert client.durable_step(at_least=3, timeout_s=DEADLINE_S) == 3
        assert client.status()["persisted"] == [3]
    manifest = load_manifest(open_store(root), step_folder(3))
    assert sorted(manifest.tensors) == ["w0", "w1", "w2"]


def test_a_checkpoint_refers_to_the_one_before_where_nothing_changed(three: SidecarGroup) -> None:
    world = three.adopt()
    root = three.directory / "checkpoints"
    target = CheckpointTarget(root=str(root), incremental=True, compression={"*": "zstd"})
    for step in (3, 4):
        for rank, node in enumerate(world.rank_nodes):
            seed = step if rank == 0 else 0
            write_block(
                three.clients[node],
                world,
                step=step,
                rank=rank,
                nbytes=1000,
                persist=target,
                seed=seed,
            )
        for client in three.clients.values():
            assert client.durable_step(at_least=step, timeout_s=DEADLINE_S) == step
    with StoreSource(root, 4) as source:
        homes = [len(record.bases) for record in source.manifest.writers]
        assert homes == [0, 1, 1]
        read = Assembler(source)
        assert read.bytes("w1") == random_payload(1000, seed=(world.generation, 0, 1))
    with StoreSource(root, 3) as source:
        assert not source.manifest.bases()


def test_a_store_that_fails_is_reported_and_hurts_nothing(three: SidecarGroup) -> None:
    world = three.adopt()
    root = three.directory / "a-file"
    root.write_text("in the way")
    for rank, node in enumerate(world.rank_nodes):
        write_block(
            three.clients[node],
            world,
            step=3,
            rank=rank,
            nbytes=1000,
            persist=CheckpointTarget(root=str(root)),
        )
    for client in three.clients.values():
        with pytest.raises(CkptError, match="checkpoint of step 3"):
            client.durable_step(at_least=3, timeout_s=DEADLINE_S)
        assert "checkpoint of step 3" in client.status()["persist_error"]
    write_step(three, world, 4)
    assert three.clients["a"].durable_step() == -1
