"""The generation that a launcher's processes form with the sidecars beside them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.ckpt.memory.records import BlockEntry, Inventory, SidecarPeer, SnapshotWorld
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.sidecar.launch import start_sidecar
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.channel.base import Channel
from holdfast.elastic.channel.launched import Joiner, LaunchedChannel, choose, form
from holdfast.elastic.channel.sidecar_file import SidecarFile
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.membership.records import JobSpec


def joiner(rank: int, node: str = "a", *, address: str = "tcp://a", **spec: int) -> Joiner:
    file = SidecarFile(run="r", node=node, domain="", address=address, key_file="k", pid=1)
    job = JobSpec(**spec)  # type: ignore[arg-type]
    return Joiner(rank=rank, incarnation=f"i{rank}", sidecar=file, spec=job, info={})


def test_the_channel_has_everything_that_a_channel_has() -> None:
    wanted = {name for name, _ in inspect.getmembers(Channel, inspect.isfunction)}
    for name in sorted(name for name in wanted if not name.startswith("_")):
        theirs = inspect.signature(getattr(Channel, name)).parameters
        assert inspect.signature(getattr(LaunchedChannel, name)).parameters == theirs, name


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([joiner(0, parity=0), joiner(1, parity=1)], "same settings everywhere"),
        ([joiner(0), joiner(1, address="tcp://b")], "each node one --node"),
        ([joiner(0, dp=3)], "the launcher started 1 processes"),
        ([joiner(0, min_dp=2)], "at least 2"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(ranks: list[Joiner], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        form(ranks, key=RunKey.new())


def world(generation: int, *nodes: str) -> SnapshotWorld:
    return SnapshotWorld(
        run="r",
        generation=generation,
        peers=tuple(SidecarPeer(node=node, address=f"tcp://{node}") for node in nodes),
        rank_nodes=nodes,
        parity=0,
        keep=2,
    )


def holds(node: str, *keys: tuple[int, int], worlds: tuple[SnapshotWorld, ...]) -> Inventory:
    blocks = tuple(
        BlockEntry(
            generation=generation, step=step, rank=0, payload_bytes=8, index_bytes=2, index_crc32c=0
        )
        for generation, step in keys
    )
    return Inventory(node=node, worlds=worlds, blocks=blocks, parities=(), sealed=blocks)


def test_a_future_that_a_younger_generation_rolled_back_is_not_chosen() -> None:
    worlds = (world(1, "a"), world(2, "a"))
    inventory = holds("a", (1, 8), (1, 12), (2, 9), worlds=worlds)
    points, _ = choose([inventory])
    assert [(point.world.generation, point.step) for point in points] == [(2, 9), (1, 8)]


def test_without_anything_in_memory_there_is_nothing_to_choose() -> None:
    points, why = choose([holds("a", worlds=())])
    assert points == []
    assert "no snapshot" in why


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[tuple[SidecarFile, RunKey]]:
    """Give a real sidecar's file and key."""
    key_file = tmp_path / "key.json"
    key = RunKey.new()
    key.save(key_file)
    process = start_sidecar(
        run=f"launched-{tmp_path.name[-12:]}", node="a", key_file=key_file, run_dir=tmp_path
    )
    run = process.arena_dir.name.removeprefix("holdfast-").removesuffix("-a")
    yield (
        SidecarFile(
            run=run, node="a", domain="", address=process.address, key_file=str(key_file), pid=1
        ),
        key,
    )
    process.stop()


def test_every_start_is_a_new_generation_of_the_same_sidecars(
    sidecar: tuple[SidecarFile, RunKey],
) -> None:
    file, key = sidecar
    ranks = [
        Joiner(rank=rank, incarnation=f"i{rank}", sidecar=file, spec=JobSpec(), info={})
        for rank in range(2)
    ]
    first, second = form(ranks, key=key), form(ranks, key=key)
    assert (first.number, second.number) == (1, 2)
    assert [member.seat for member in second.members] == ["trainer/0", "trainer/1"]
    assert second.snapshots.parity == 0  # one node guards nobody
    client = SidecarClient(file.address, key)
    assert client.status()["generation"] == 2
    client.close()
