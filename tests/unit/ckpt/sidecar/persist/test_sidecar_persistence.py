"""Checkpoints continue with slow stores, full stores and lost nodes."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from doubles.blocks import write_block
from fault_stores import CHANGES, Wrapped, using
from sidecar_group import (
    DEADLINE_S,
    SidecarGroup,
    inventories,
    sidecar_group,
    wait_until,
)

from holdfast.ckpt.checkpoints import commit, fence
from holdfast.ckpt.checkpoints.assemble import Assembler
from holdfast.ckpt.checkpoints.catalog import committed, step_folder
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.events import CheckpointCarried, CheckpointFailed
from holdfast.ckpt.memory.records import RestorePoint, SnapshotWorld
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.sidecar.core.lease_page import LeasePage
from holdfast.ckpt.sidecar.persist import paced_writer, persistence
from holdfast.ckpt.store.local import LocalStore

NBYTES = 5000


@pytest.fixture
def three(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c", threads=True) as group:
        yield group


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_writer, "BACKOFF_S", (0.01, 0.02))


class Gate:
    """Holds the writing of packs of some ranks until it is opened."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.opened = threading.Event()
        self.packs: set[tuple[int, int]] = set()
        self._write = commit.write_pack

    def write_pack(self, *arguments: Any, **options: Any) -> commit.WriterReceipt:
        index = options["index"]
        if index.writer in self.ranks:
            self.packs.add((index.step, index.writer))
            assert self.opened.wait(DEADLINE_S)
        return self._write(*arguments, **options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Gate]]:
    made: list[Gate] = []

    def make(*ranks: int) -> Gate:
        made.append(Gate(ranks))
        monkeypatch.setattr(commit, "write_pack", made[-1].write_pack)
        return made[-1]

    yield make
    for each in made:
        each.opened.set()


def save(
    group: SidecarGroup, world: SnapshotWorld, step: int, target: CheckpointTarget
) -> dict[int, bytes]:
    """Snapshot a step of which a checkpoint is wanted; return once it is protected."""
    payloads = {
        rank: write_block(
            group.clients[node], world, step=step, rank=rank, nbytes=NBYTES, persist=target
        )
        for rank, node in enumerate(world.rank_nodes)
    }
    group.await_protected(world, step)
    return payloads


def target_of(group: SidecarGroup, **options: Any) -> CheckpointTarget:
    return CheckpointTarget(root=str(group.directory / "root"), **options)


def await_durable(group: SidecarGroup, step: int) -> None:
    for client in group.clients.values():
        assert client.durable_step(at_least=step, timeout_s=DEADLINE_S) == step


def assert_saved(group: SidecarGroup, step: int, payloads: dict[int, bytes]) -> None:
    with StoreSource(group.directory / "root", step) as source:
        read = Assembler(source)
        for rank, payload in payloads.items():
            assert read.bytes(f"w{rank}") == payload


def news(group: SidecarGroup, node: str = "a") -> list[str]:
    return [item.event.kind for item in group.clients[node].news()]


def best(group: SidecarGroup) -> RestorePoint:
    return restore_points(inventories(group))[0][0]


def all_unpinned(group: SidecarGroup) -> bool:
    return not any(
        slot.pins or slot.persisting
        for sidecar in group.sidecars.values()
        for slot in sidecar.core.slots.all()
    )


# -- the right to publish -------------------------------------------------------------------------


def failure_of(group: SidecarGroup) -> str:
    found: list[str] = []

    def failed() -> bool:
        news = [item.event for item in group.clients["a"].news()]
        found.extend(event.error for event in news if isinstance(event, CheckpointFailed))
        return bool(found)

    wait_until(failed, "a checkpoint fails")
    return found[-1]


def test_nothing_is_published_after_another_run_took_the_root(three: SidecarGroup) -> None:
    world, target = three.adopt(), target_of(three)
    payloads = save(three, world, 1, target)
    await_durable(three, 1)
    store = LocalStore(target.root)
    fence.take(store, run="newer", generation=1)
    save(three, world, 2, target)
    assert "run newer has begun to write here" in failure_of(three)
    assert committed(store) == [1]
    assert_saved(three, 1, payloads)


def test_nothing_is_published_past_the_nodes_lease(three: SidecarGroup) -> None:
    world, target = three.adopt(), target_of(three)
    page = LeasePage.create("test")
    page.extend(1)
    three.sidecars["a"].persistence._packing._lease = page
    save(three, world, 1, target)
    assert "the lease of node a ran out" in failure_of(three)
    assert committed(LocalStore(target.root)) == []
    page.extend(time.monotonic_ns() + int(1e12))
    save(three, world, 2, target)
    await_durable(three, 2)


# -- slow and failing stores ---------------------------------------------------------------------


def test_while_a_store_is_slow_the_newest_waits_and_training_goes_on(
    three: SidecarGroup, gate: Callable[..., Gate]
) -> None:
    barrier, world, target = gate(0, 1, 2), three.adopt(keep=1), target_of(three)
    saved = {step: save(three, world, step, target) for step in (1, 2, 3, 4)}
    assert {step for step, _ in barrier.packs} == {1}
    barrier.opened.set()
    await_durable(three, 4)
    for client in three.clients.values():
        status = client.status()
        assert (status["persisted"], status["persist_skipped"]) == ([1, 4], [2, 3])
    assert_saved(three, 4, saved[4])
    assert_saved(three, 1, saved[1])
    assert news(three).count("checkpoint_skipped") == 2
    wait_until(lambda: all_unpinned(three), "every block is let go")


class Failing(Wrapped):
    """Refuses the first writes of packs."""

    def __init__(self, root: Path, *, failures: int, error: Exception) -> None:
        super().__init__(LocalStore(root))
        self.left, self.error, self.lock = failures, error, threading.Lock()

    def about_to(self, operation: str, name: str) -> None:
        with self.lock:
            if operation == "write" and name.endswith(".pack") and self.left:
                self.left -= 1
                raise self.error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        StoreError("the store is full"),
    ],
)
def test_a_store_that_refuses_for_a_while_is_asked_again(
    three: SidecarGroup, error: Exception
) -> None:
    world = three.adopt()
    with using(Failing(three.directory / "root", failures=3, error=error)):
        payloads = save(three, world, 1, target_of(three, retries=3))
        await_durable(three, 1)
    assert_saved(three, 1, payloads)
    wait_until(lambda: all_unpinned(three), "every block is let go")


def test_several_failures_in_a_row_are_fatal_and_one_success_makes_up_for_them(
    three: SidecarGroup,
) -> None:
    world = three.adopt()
    target = target_of(three, failures_allowed=1)
    found: list[bool] = []
    for step, failures in ((1, 99), (2, 0), (3, 99), (4, 99)):
        store = Failing(three.directory / "root", failures=failures, error=OSError(28, "full"))
        with using(store):
            save(three, world, step, target)
            if failures:
                for client in three.clients.values():
                    with pytest.raises(StoreError, match=f"checkpoint of step {step}"):
                        client.durable_step(at_least=step, timeout_s=DEADLINE_S)
            else:
                await_durable(three, step)
    for item in three.clients["a"].news():
        if isinstance(item.event, CheckpointFailed):
            found.append(item.event.fatal)
    assert found == [False, False, True]
    assert three.clients["c"].status()["persist_failed_in_a_row"] == 2


def test_the_next_checkpoint_removes_the_packs_of_one_that_failed(three: SidecarGroup) -> None:
    """On a disk that is nearly full they would keep every later checkpoint from fitting."""
    world, target = three.adopt(), target_of(three)
    save(three, world, 1, target)
    await_durable(three, 1)
    store = LocalStore(target.root)

    def two_are_written() -> bool:
        return len(store.names(f"{step_folder(2)}/data")) == 2

    class FullForTheLast(Wrapped):
        def about_to(self, operation: str, name: str) -> None:
            if operation == "write" and "/data/00002" in name:
                wait_until(two_are_written, "two ranks have room")
                raise OSError(errno.ENOSPC, "full")

    with using(FullForTheLast(store)):
        save(three, world, 2, target)
        assert "checkpoint of step 2" in failure_of(three)
    assert two_are_written()
    save(three, world, 3, target)
    await_durable(three, 3)
    wait_until(lambda: step_folder(2) not in store.names(""), "they are removed")
    assert committed(store) == [1, 3]


def test_a_bandwidth_holds_and_progress_is_told(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistence, "PROGRESS_S", 0.02)
    world = three.adopt()
    save(three, world, 1, target_of(three, bytes_per_s=20_000))
    await_durable(three, 1)
    done: dict[str, Any] = {i.event.kind: i.event for i in three.clients["a"].news()}
    assert done["checkpoint_done"].seconds > 0.1
    assert done["checkpoint_started"].bytes == 3 * NBYTES
    progress = done["checkpoint_progress"]
    assert 0 < progress.bytes <= progress.total_bytes + 3 * 4096


def test_news_are_told_once(three: SidecarGroup) -> None:
    world, client = three.adopt(), three.clients["a"]
    save(three, world, 1, target_of(three))
    await_durable(three, 1)
    first = client.news()
    assert [item.event.kind for item in first] == ["checkpoint_started", "checkpoint_done"]
    assert client.news(after=first[0].number) == first[1:]
    assert client.news(after=first[1].number, timeout_s=0.05) == []
    assert client.news() == []


# -- changes of generation -----------------------------------------------------------------------


def test_a_checkpoint_under_way_is_carried_over(
    three: SidecarGroup, gate: Callable[..., Gate]
) -> None:
    barrier, world, target = gate(1), three.adopt(keep=1), target_of(three)
    payloads = save(three, world, 5, target)
    wait_until(lambda: bool(barrier.packs), "rank 1 is being written")
    save(three, world, 6, target)
    after = three.adopt(generation=2, restore=best(three), keep=1)
    for step in (7, 8):
        for rank, node in enumerate(after.rank_nodes):
            write_block(three.clients[node], after, step=step, rank=rank, nbytes=NBYTES)
        three.await_protected(after, step)
    barrier.opened.set()
    await_durable(three, 6)
    assert three.clients["b"].status()["persisted"] == [5, 6]
    assert_saved(three, 5, payloads)
    assert "checkpoint_carried" in news(three)
    wait_until(lambda: all_unpinned(three), "every block is let go")


@pytest.mark.parametrize("lost", ["a", "b"])
def test_the_block_of_a_lost_node_is_rebuilt_for_its_checkpoint(
    three: SidecarGroup, gate: Callable[..., Gate], lost: str
) -> None:
    barrier, world = gate(*range(3)), three.adopt()
    payloads = save(three, world, 5, target_of(three))
    wait_until(lambda: len(barrier.packs) == 3, "all ranks are being written")
    three.kill(lost, wipe=True)
    left = tuple(sorted(three.clients))
    three.adopt(generation=2, rank_nodes=left, restore=best(three))
    barrier.opened.set()
    await_durable(three, 5)
    assert_saved(three, 5, payloads)
    items = three.clients[left[0]].news()
    carried = [item.event for item in items if isinstance(item.event, CheckpointCarried)]
    assert carried[0].rebuilt == (world.rank_nodes.index(lost),)
    wait_until(lambda: all_unpinned(three), "every block is let go")


@pytest.mark.parametrize("killed", ["a", "b"])
def test_a_sidecar_killed_while_it_writes_goes_on(
    three: SidecarGroup, gate: Callable[..., Gate], killed: str
) -> None:
    barrier, world = gate("abc".index(killed)), three.adopt()
    payloads = save(three, world, 5, target_of(three))
    wait_until(lambda: bool(barrier.packs), "its rank is being written")
    three.kill(killed, wipe=False)
    three.start(killed)
    three.adopt(generation=2, restore=best(three))
    barrier.opened.set()
    await_durable(three, 5)
    assert_saved(three, 5, payloads)
    wait_until(lambda: all_unpinned(three), "every block is let go")


def test_the_very_state_a_generation_began_with_is_written_once(
    three: SidecarGroup, gate: Callable[..., Gate]
) -> None:
    barrier, world, target = gate(1), three.adopt(), target_of(three)
    payloads = save(three, world, 5, target)
    wait_until(lambda: bool(barrier.packs), "rank 1 is being written")
    after = three.adopt(generation=2, restore=best(three))
    save(three, after, 5, target)
    barrier.opened.set()
    await_durable(three, 5)
    wait_until(
        lambda: not three.clients["a"].status()["persist_pending"], "nothing is left to write"
    )
    assert_saved(three, 5, payloads)
    assert barrier.packs == {(5, 1)}


def test_what_was_rolled_back_is_given_up_and_says_so(
    three: SidecarGroup, gate: Callable[..., Gate]
) -> None:
    barrier, world, target = gate(1), three.adopt(), target_of(three)
    save(three, world, 4, CheckpointTarget(root=target.root))
    save(three, world, 5, target)
    wait_until(lambda: bool(barrier.packs), "rank 1 is being written")
    points, _ = restore_points(inventories(three))
    older = next(point for point in points if point.step == 4)
    three.adopt(generation=2, restore=older)
    for client in three.clients.values():
        with pytest.raises(StoreError, match="step 5: given up, the snapshot was rolled back"):
            client.durable_step(at_least=5, timeout_s=DEADLINE_S)
        assert client.status()["persist_failed_in_a_row"] == 0
    barrier.opened.set()
    await_durable(three, 4)
    wait_until(lambda: all_unpinned(three), "every block is let go")


def test_a_checkpoint_that_nobody_can_complete_is_given_up_with_the_reason(
    three: SidecarGroup, gate: Callable[..., Gate]
) -> None:
    barrier, world = gate(0, 1, 2), three.adopt(keep=2)
    save(three, world, 5, target_of(three))
    wait_until(lambda: len(barrier.packs) == 3, "all ranks are being written")
    point = best(three)
    three.kill("b", wipe=True)
    three.kill("c", wipe=True)
    three.adopt(generation=2, rank_nodes=("a",), restore=point)
    barrier.opened.set()
    with pytest.raises(StoreError, match=r"step 5: given up, the block of rank [12] was lost"):
        three.clients["a"].durable_step(at_least=5, timeout_s=DEADLINE_S)
    wait_until(lambda: all_unpinned(three), "every block is let go")


class Stopping(Wrapped):
    """Lets ``changes`` changes through; the next never returns, as if the process were killed."""

    def __init__(self, root: Path, *, changes: int) -> None:
        super().__init__(LocalStore(root))
        self.left = changes
        self.stopped, self.released = threading.Event(), threading.Event()

    def about_to(self, operation: str, name: str) -> None:
        if operation not in CHANGES:
            return
        if self.left == 0:
            self.stopped.set()
            self.released.wait(DEADLINE_S)
            raise StoreError("killed")
        self.left -= 1


def stop_after(changes: int, directory: Path) -> bool:
    """Kill a lone sidecar after so many changes of the store; return whether it had not ended."""
    directory.mkdir()
    store = Stopping(directory / "root", changes=changes)
    with sidecar_group(directory, "a", threads=True) as one, contextlib.ExitStack() as stack:
        stack.callback(store.released.set)
        with using(store):
            payloads = save(one, one.adopt(), 5, target_of(one))
            done = one.clients["a"].durable_step
            wait_until(lambda: store.stopped.is_set() or done() == 5, "it stops, or is durable")
        if not store.stopped.is_set():
            return False
        one.kill("a", wipe=False)
        one.start("a")
        one.adopt(generation=2, restore=best(one))
        await_durable(one, 5)
        assert_saved(one, 5, payloads)
    return True


def test_a_sidecar_killed_between_any_two_writes_goes_on(tmp_path: Path) -> None:
    changes = 0
    while stop_after(changes, tmp_path / str(changes)):
        changes += 1
    assert changes > 3
