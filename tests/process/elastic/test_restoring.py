"""Ranks agree on a restore point inside one generation, through real sidecars."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sidecar_group import SidecarGroup, inventories, sidecar_group
from torch import nn

from holdfast import ckpt
from holdfast.ckpt.errors import CorruptError, FencedError, StoreError
from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.memory.records import BlockSource, RestorePoint, SnapshotWorld
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.errors import GenerationOverError, JobFailedError, StateLostError
from holdfast.elastic.events import RestoreFailed
from holdfast.elastic.membership.records import GenerationRecord, Origin
from holdfast.elastic.tracked.restoring import Restorer
from holdfast.elastic.tracked.sources import stored
from holdfast.elastic.tracked.sources.restored import Restored

NODES = ("a", "b", "c")
RANK_NODES = ("a", "b")
STEPS = (1, 2)


def called(body: Callable[[], Any], *, name: str, limit_s: float | None = None) -> Any:
    """Do what the guard of a generation does with a call, without looking for a fence."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    try:
        return pool.submit(body).result(limit_s)
    finally:
        pool.shutdown(wait=False)


def build(fill: float) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(600, 500), nn.Linear(500, 300))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return {"model": model, "step": int(fill)}


def value(state: dict[str, Any]) -> float:
    """The one number the state is filled with, and its step."""
    found = {float(number) for p in state["model"].parameters() for number in p.detach().unique()}
    assert found == {float(state["step"])}, "parts of several steps"
    return found.pop()


class Ranks:
    """Two ranks as threads, with the state that each needs and the events of each.

    ``ahead`` says whether they open what they restore before their state is there, and
    ``meanwhile`` is what happens while that is built.
    """

    ahead = False

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None
        self._barrier = threading.Barrier(len(RANK_NODES), timeout=250)
        self._said: dict[int, Any] = {}
        self.events: list[RestoreFailed] = []
        self.fenced = False

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(said: Any) -> list[Any]:
            self._said[rank] = said
            self._barrier.wait()
            everyone = [self._said[r] for r in range(len(RANK_NODES))]
            self._barrier.wait()
            return everyone

        return gather

    def check(self) -> None:
        if self.fenced:
            raise GenerationOverError("generation 2 is over")

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Return what ``body`` returned or raised, per rank."""
        results: dict[int, Any] = {}

        def one(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except Exception as error:  # noqa: BLE001 - told to the test
                results[rank] = error

        threads = [threading.Thread(target=one, args=(r,)) for r in range(len(RANK_NODES))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [results[rank] for rank in range(len(RANK_NODES))]


@pytest.fixture(params=[False, True], ids=["", "opened ahead"], autouse=True)
def _ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "ahead", request.param)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, *NODES, threads=True) as group:
        yield group


def save(group: SidecarGroup, ranks: Ranks) -> tuple[RestorePoint, ...]:
    """Snapshot two steps in generation 1, and enter generation 2; return the restore points."""
    world = group.adopt(rank_nodes=RANK_NODES)

    def body(rank: int) -> None:
        snapshots = Snapshotter(
            group.clients[RANK_NODES[rank]],
            run=group.run,
            generation=1,
            rank=rank,
            world_size=len(RANK_NODES),
            gather=ranks.gather(rank),
        )
        for step in STEPS:
            snapshots.snapshot(build(step), step)
            snapshots.fence()
            group.await_protected(world, step)
        snapshots.close()

    assert ranks.run(body) == [None, None]
    points, _ = restore_points(inventories(group))
    assert [point.step for point in points] == [2, 1]
    group.adopt(rank_nodes=RANK_NODES, generation=2, restore=points[0])
    return tuple(points)


def damage(group: SidecarGroup, point: RestorePoint, rank: int) -> None:
    """Flip a bit in the middle of a block's tensors."""
    source = BlockSource(rank=rank, node=RANK_NODES[rank])
    client = group.clients[source.node]
    handle = client.open_block(point.world, point.step, source)
    with Path(handle.path).open("r+b") as slot:
        at = HEADER_BYTES + handle.payload_bytes // 2
        slot.seek(at)
        (byte,) = slot.read(1)
        slot.seek(at)
        slot.write(bytes([byte ^ 4]))


def restore(
    group: SidecarGroup,
    ranks: Ranks,
    *points: RestorePoint,
    root: Path | None = None,
    number: int = 2,
    before: tuple[Origin, ...] = (),
    timeline: tuple[Origin, ...] = (),
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Have both ranks restore in generation 2; return what came of it, and their states.

    ``number`` is that of the record. The run is that of checkpoints that belong to none, ``""``.
    """
    addresses = group.addresses()
    world = SnapshotWorld(
        run=group.run,
        generation=2,
        peers=tuple(peer for peer in points[0].world.peers if peer.node in addresses),
        rank_nodes=RANK_NODES,
        parity=1,
        keep=2,
    )
    record = GenerationRecord(
        number=number,
        members=(),
        snapshots=world,
        restore=points[0] if number > 1 else None,
        fallbacks=points[1:],
        before=before,
        timeline=timeline,
        reason="test",
    )
    states = [build(0) for _ in RANK_NODES]

    def body(rank: int) -> Restored:
        found: Any = SimpleNamespace(
            record=record,
            size=len(RANK_NODES),
            rank=rank,
            generation=2,
            gather=ranks.gather(rank),
            guard=SimpleNamespace(check=ranks.check, call=called),
        )
        channel: Any = SimpleNamespace(
            run="",
            node=RANK_NODES[rank],
            key=group.key,
            emit=ranks.events.append,
        )
        client = group.clients[RANK_NODES[rank]]
        with Restorer(channel, found, client=client, maps=SlotMaps()) as restorer:
            if ranks.ahead:
                restorer.open_ahead()
                assert restorer._opening is not None
                restorer._opening._thread.join(30)
            ranks.gather(rank)(None)
            if rank == 0:
                ranks.meanwhile()
            ranks.gather(rank)(None)
            return restorer.restore(states[rank], root=str(root) if root else None)

    return ranks.run(body), states


def steps_held(group: SidecarGroup) -> set[int]:
    return {entry.step for each in inventories(group) for entry in each.blocks}


def test_an_intact_point_is_restored_from_where_it_lies(group: SidecarGroup) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    results, states = restore(group, ranks, *points)
    assert [value(state) for state in states] == [2, 2]
    assert [each.tier for each in results] == ["peer", "peer"], "each holds a part for both"
    for each in results:
        assert each.bytes == sum(part["bytes"] for part in each.tiers.values())
        assert set(each.tiers) == {"arena", "peer"}
    assert ranks.events == []


def test_a_damaged_block_is_rebuilt_and_the_same_step_restored(group: SidecarGroup) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    damage(group, points[0], rank=1)
    results, states = restore(group, ranks, *points)
    assert [value(state) for state in states] == [2, 2]
    assert {each.tier for each in results} == {"parity"}
    assert all(each.how.startswith("rank 1 rebuilt on b: ") for each in results)
    (event,) = ranks.events
    assert (event.step, event.next_step) == (2, 2)
    assert "of rank 1 fails its checksum" in event.reason
    assert group.clients["b"].status()["counters"]["distrusted"] >= 1
    assert steps_held(group) == {1, 2}


def test_more_damage_than_parity_covers_goes_back_to_the_older_step(group: SidecarGroup) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    for rank in range(len(RANK_NODES)):
        damage(group, points[0], rank=rank)
    results, states = restore(group, ranks, *points)
    assert [value(state) for state in states] == [1, 1]
    assert {each.step for each in results} == {1}
    assert [event.next_step for event in ranks.events] == [2, 1]
    assert "step 1 of generation 1 is the next older one" in results[0].how
    assert steps_held(group) == {1}, "the step that was given up is not offered again"


def test_a_holder_that_is_gone_is_replaced_by_parity(group: SidecarGroup) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    gone = RestorePoint(
        world=points[0].world,
        step=2,
        sources=(points[0].sources[0], BlockSource(rank=1, node="x")),
    )
    results, states = restore(group, ranks, gone, points[1])
    assert [value(state) for state in states] == [2, 2]
    assert "no address of node x" in ranks.events[0].reason
    assert "b" in results[0].how or "c" in results[0].how


def test_where_memory_has_nothing_good_the_checkpoint_is_loaded(
    group: SidecarGroup, tmp_path: Path
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    for point in points:
        for rank in range(len(RANK_NODES)):
            damage(group, point, rank=rank)
    results, states = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [value(state) for state in states] == [7, 7]
    assert {(each.tier, each.step) for each in results} == {("checkpoint", 7)}
    assert "no other step is in memory" in results[0].how
    assert steps_held(group) == set()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PATIENCE_S", "_NEWER_LIMIT_S"):
        monkeypatch.setattr(stored, name, 1.0)
    monkeypatch.setattr(stored, "_PAUSE_S", 0.1)


def refuse(
    monkeypatch: pytest.MonkeyPatch, *methods: str, error: Exception, times: int = 10**9
) -> None:
    """Have a store refuse the first ``times`` calls of its methods."""
    left = {"calls": times}
    for method in methods:
        real = getattr(LocalStore, method)

        def call(*args: Any, _real: Any = real, **named: Any) -> Any:
            left["calls"] -= 1
            if left["calls"] >= 0:
                raise error
            return _real(*args, **named)

        monkeypatch.setattr(LocalStore, method, call)


FULL = StoreError("/store: cannot write in it: No space left on device; make room there")


def without_memory(group: SidecarGroup, ranks: Ranks) -> tuple[RestorePoint, ...]:
    """Save steps 1 and 2, and damage both beyond repair."""
    points = save(group, ranks)
    for point in points:
        for rank in range(len(RANK_NODES)):
            damage(group, point, rank=rank)
    return points


def test_a_store_that_cannot_be_written_for_a_while_ends_no_job_that_has_trained(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    ranks = Ranks()
    points = without_memory(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    refuse(monkeypatch, "write", error=FULL)
    results, states = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [value(state) for state in states] == [7, 7]
    assert {(each.tier, each.step) for each in results} == {("checkpoint", 7)}
    assert "checkpoints fail for now: " in caplog.text and "No space left" in caplog.text


def test_a_store_that_cannot_be_written_is_refused_as_a_job_starts(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    ranks.ahead = False  # there is nothing to open
    points = save(group, ranks)
    refuse(monkeypatch, "write", error=FULL)
    results, _ = restore(group, ranks, *points, root=tmp_path / "saved", number=1)
    assert [(type(each), str(each)) for each in results] == [(StoreError, str(FULL))] * 2


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("methods", [("names",), ("size",), ("open",), ("names", "open", "read")])
def test_a_store_that_cannot_be_read_for_a_while_is_waited_for(
    group: SidecarGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    methods: tuple[str, ...],
) -> None:
    ranks = Ranks()
    points = without_memory(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    broken = OSError(5, "Input/output error")
    error = StoreError("/store: cannot read it: Input/output error")
    error.__cause__ = broken
    refuse(monkeypatch, *methods, error=error, times=3)
    results, states = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [value(state) for state in states] == [7, 7]
    assert {each.tier for each in results} == {"checkpoint"}


@pytest.mark.usefixtures("impatient")
def test_bytes_that_a_disk_does_not_return_for_a_while_are_waited_for(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    points = without_memory(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    error = CorruptError("/store: the disk fails to read it")
    error.__cause__ = OSError(5, "Input/output error")
    refuse(monkeypatch, "read", "open", error=error, times=3)
    _, states = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [value(state) for state in states] == [7, 7]


@pytest.mark.usefixtures("impatient")
def test_a_store_that_stays_away_ends_the_job_in_the_end(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    points = without_memory(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    refuse(monkeypatch, "names", error=StoreError("/store: gone"))
    results, _ = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [type(each) for each in results] == [JobFailedError, JobFailedError]
    assert "memory has nothing to restore, and the store refuses since 1 s: /store: gone" in str(
        results[0]
    )


BEFORE = (Origin(generation=1, step=9),)
"""A timeline in which generation 1 went on from step 9 of generation 0, which `ckpt.save` names."""


def test_a_checkpoint_comes_first_if_memory_fell_behind_it(
    group: SidecarGroup, tmp_path: Path
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    for step in (1, 6, 7):
        ckpt.save(tmp_path / "saved", build(step), step=step)
    results, states = restore(group, ranks, *points, root=tmp_path / "saved", before=BEFORE)
    assert [value(state) for state in states] == [7, 7]
    assert {(each.tier, each.step) for each in results} == {("checkpoint", 7)}
    assert "newer than step 2 of generation 1 in memory" in results[0].how
    assert steps_held(group) == set(), "no later generation goes back to what memory had"


@pytest.mark.parametrize(
    "kept", ["older", "as memory has it", "of an abandoned future", "damaged", "of another run"]
)
def test_memory_comes_first_if_no_newer_checkpoint_is_good(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    step = {"older": 1, "as memory has it": 2, "of an abandoned future": 10}.get(kept, 7)
    ckpt.save(tmp_path / "saved", build(step), step=step)
    if kept == "damaged":
        for pack in (tmp_path / "saved").rglob("*.pack"):
            data = bytearray(pack.read_bytes())
            data[len(data) // 2] ^= 1
            pack.write_bytes(data)
    if kept == "of another run":
        real = stored.newer_steps
        monkeypatch.setattr(
            stored, "newer_steps", lambda root, **named: real(root, **{**named, "run": "other"})
        )
    results, states = restore(group, ranks, *points, root=tmp_path / "saved", before=BEFORE)
    assert [value(state) for state in states] == [2, 2]
    assert {each.tier for each in results} == {"peer"}
    assert steps_held(group) == {1, 2}


def test_a_store_is_not_asked_if_memory_did_not_fall_behind(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    refuse(monkeypatch, "names", "read", "open", error=AssertionError("the store was asked"))
    _, states = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [value(state) for state in states] == [2, 2]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_training_goes_on_from_memory_if_the_store_does_not_answer_in_time(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, how: str
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    over = threading.Event()
    if how == "refuses":
        refuse(monkeypatch, "names", error=StoreError("/store: gone"))
    else:
        monkeypatch.setattr(LocalStore, "names", lambda *_: over.wait(60) and [])
    _, states = restore(group, ranks, *points, root=tmp_path / "saved", before=BEFORE)
    over.set()
    assert [value(state) for state in states] == [2, 2]
    assert "going on from step 2, though checkpoints may be newer: " in caplog.text


@pytest.mark.usefixtures("impatient")
def test_a_store_that_refuses_for_a_moment_still_comes_first(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    refuse(monkeypatch, "names", "open", error=StoreError("/store: gone"), times=3)
    _, states = restore(group, ranks, *points, root=tmp_path / "saved", before=BEFORE)
    assert [value(state) for state in states] == [7, 7]


def test_a_checkpoint_comes_before_an_older_step_if_the_newest_is_damaged(
    group: SidecarGroup, tmp_path: Path
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    for rank in range(len(RANK_NODES)):
        damage(group, points[0], rank=rank)
    ckpt.save(tmp_path / "saved", build(2), step=2)
    timeline = (Origin(generation=2, step=2),)
    results, states = restore(group, ranks, *points, root=tmp_path / "saved", timeline=timeline)
    assert [value(state) for state in states] == [2, 2]
    assert {each.tier for each in results} == {"checkpoint"}
    assert "newer than step 1 of generation 1 in memory" in results[0].how


def test_a_half_restored_state_is_never_trained_on(group: SidecarGroup, tmp_path: Path) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    for point in points:
        for rank in range(len(RANK_NODES)):
            damage(group, point, rank=rank)
    results, _ = restore(group, ranks, *points)
    assert [type(each) for each in results] == [StateLostError, StateLostError]
    assert "there is no checkpoint; training starts anew" in str(results[0])
    assert "step 2 of generation 1" in str(results[0])
    assert "step 1 of generation 1" in str(results[0])


def test_damaged_memory_and_damaged_checkpoints_are_both_named(
    group: SidecarGroup, tmp_path: Path
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    root = tmp_path / "saved"
    ckpt.save(root, build(7), step=7)
    for pack in root.rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
    for point in points:
        for rank in range(len(RANK_NODES)):
            damage(group, point, rank=rank)
    results, _ = restore(group, ranks, *points, root=root)
    assert [type(each) for each in results] == [JobFailedError, JobFailedError]
    assert "step 2 of generation 1" in str(results[0])
    assert "no checkpoint can be read in full" in str(results[0])


def test_a_fence_ends_the_attempts_at_once(group: SidecarGroup) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    damage(group, points[0], rank=0)
    ranks.fenced = True
    results, _ = restore(group, ranks, *points)
    assert [type(each) for each in results] == [GenerationOverError, GenerationOverError]


def test_what_is_damaged_while_the_state_is_built_is_found(group: SidecarGroup) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    ranks.meanwhile = lambda: damage(group, points[0], rank=1)
    results, states = restore(group, ranks, *points)
    assert [value(state) for state in states] == [2, 2]
    assert {each.tier for each in results} == {"parity"}


def test_a_slot_that_is_used_again_while_the_state_is_built_is_not_taken_for_what_it_was(
    group: SidecarGroup,
) -> None:
    ranks = Ranks()
    points = save(group, ranks)

    def drop_the_step() -> None:
        for client in group.clients.values():
            client.roll_back(2, restore=points[1])

    ranks.meanwhile = drop_the_step
    results, states = restore(group, ranks, *points)
    assert [value(state) for state in states] == [1, 1]
    assert {each.step for each in results} == {1}


def test_who_waits_for_a_slot_is_refused_when_its_generation_is_fenced(
    group: SidecarGroup,
) -> None:
    world = group.adopt(rank_nodes=RANK_NODES)
    client = group.clients["a"]

    def acquire(step: int) -> Any:
        return client.acquire(
            generation=world.generation, step=step, rank=0, size_bytes=1000, timeout_s=30
        )

    for step in range(1, world.keep + 3):
        acquire(step)
    caught: list[Exception] = []

    def wait() -> None:
        try:
            acquire(99)
        except Exception as error:  # noqa: BLE001 - told to the test
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    client.fence(world.generation)
    waiting.join(5)
    assert [type(error) for error in caught] == [FencedError]
    with pytest.raises(FencedError, match="take part in the next one"):
        acquire(100)
    group.adopt(rank_nodes=RANK_NODES, generation=2)
    assert client.acquire(generation=2, step=1, rank=0, size_bytes=1000, timeout_s=5).path
