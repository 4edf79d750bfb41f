"""Weights are those that the trainer published, and only their changes are fetched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sidecar_group import SidecarGroup, sidecar_group
from torch import nn

from holdfast.adapters.rl.policy.policy import parameter_names
from holdfast.adapters.rl.weights.places import WeightsPlace
from holdfast.adapters.rl.weights.pull import (
    Pulled,
    Reader,
    RefusedWeightsError,
    published,
    pull,
    weights_of,
)
from holdfast.adapters.rl.weights.retained import Retained
from holdfast.ckpt.errors import CorruptError, NotFoundError, PeerError
from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.memory.records import SnapshotWorld
from holdfast.ckpt.recovery.memory_source import MemorySource
from holdfast.ckpt.recovery.replica import Replica
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.state.capture import gather_alone
from holdfast.elastic.membership.records import NodeRecord, Roster

PARTS = 20


class Trainer:
    """One rank on node ``a`` that snapshots its model; ``b`` holds the parity.

    ``retained``: of so many versions before, too.
    """

    def __init__(self, group: SidecarGroup, world: SnapshotWorld, *, retained: int = 0) -> None:
        torch.manual_seed(1)
        self.group, self.world = group, world
        self.model = nn.Sequential(*(nn.Linear(30, 40) for _ in range(PARTS)))
        self.names = parameter_names(self.model)
        self.state: dict[str, nn.Module] = {"model": self.model}
        self.retained = Retained([copy.deepcopy(self.model) for _ in range(retained)])
        if retained:
            self.state["retained"] = self.retained
        self.step = -1
        self.snapshots = Snapshotter(
            group.clients["a"],
            run=group.run,
            generation=1,
            rank=0,
            world_size=1,
            gather=gather_alone,
        )

    def publish(self, *changed: str) -> dict[str, torch.Tensor]:
        """Change parameters, snapshot the next version; return it, whole, once protected."""
        self.snapshots.fence()
        if self.retained.count and self.step >= 0:
            self.retained.keep(self.model, version=self.step)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in changed:
                    parameter.add_(1.0)
        self.step += 1
        self.snapshots.snapshot(self.state, self.step)
        self.snapshots.fence()
        self.group.await_protected(self.world, self.step)
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def reader(self, node: str = "b") -> Reader:
        nodes = tuple(
            NodeRecord(node=n, incarnation=n, domain=n, sidecar=address, slots={})
            for n, address in self.group.addresses().items()
        )
        roster = Roster(nodes=nodes)
        client = self.group.clients[node]
        return Reader(client=client, node=node, roster=roster, key=self.group.key)

    def pull(self, version: int, **options: Any) -> Pulled:
        return pull(self.names, version=version, reader=self.reader(), **options)

    def published(self, place: WeightsPlace) -> str:
        return published(self.names, place, reader=self.reader("a"))


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    with sidecar_group(tmp_path, "a", "b", threads=True) as group:
        trainer = Trainer(group, group.adopt(rank_nodes=("a",)))
        yield trainer
        trainer.snapshots.close()


@pytest.fixture
def retaining(tmp_path: Path) -> Iterator[Trainer]:
    """A trainer whose last two versions are snapshots, each with the two versions before it."""
    with sidecar_group(tmp_path, "a", "b", threads=True) as group:
        trainer = Trainer(group, group.adopt(rank_nodes=("a",)), retained=2)
        yield trainer
        trainer.snapshots.close()


def own(version: int) -> WeightsPlace:
    return WeightsPlace(generation=1, step=version, version=version)


def same(pulled: Pulled, wanted: dict[str, torch.Tensor]) -> bool:
    found = pulled.tensors
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_a_consumer_fetches_what_it_lacks_then_what_changed_then_nothing(trainer: Trainer) -> None:
    replica, wanted = Replica(), trainer.publish()
    total = sum(value.nbytes for value in wanted.values())
    first = trainer.pull(0, replica=replica)
    assert same(first, wanted)
    assert (first.nbytes, first.saved) == (total, 0)
    one = "3.weight"
    wanted = trainer.publish(one)
    second = trainer.pull(1, replica=replica)
    assert same(second, wanted)
    assert (second.nbytes, second.saved) == (wanted[one].nbytes, total - wanted[one].nbytes)
    trainer.publish()
    third = trainer.pull(2, replica=replica)
    assert (third.nbytes, third.saved) == (0, total)
    assert third.digest == second.digest != first.digest
    wanted = trainer.publish(*trainer.names)
    fourth = trainer.pull(3, replica=replica)
    assert same(fourth, wanted)
    assert (fourth.nbytes, fourth.saved) == (total, 0)


def test_a_digest_is_published_without_reading_a_tensor(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish()
    found = trainer.pull(0, expected=trainer.published)
    monkeypatch.setattr("holdfast.ckpt.recovery.memory_source.MemorySource.scatter", None)
    monkeypatch.setattr("holdfast.ckpt.recovery.memory_source.MemorySource.read", None)
    assert trainer.published(own(0)) == found.digest
    with pytest.raises(NotFoundError):
        trainer.published(own(7))


def test_weights_with_another_digest_are_refused_before_a_byte_is_read(trainer: Trainer) -> None:
    replica = Replica()
    before = trainer.publish()
    trainer.pull(0, replica=replica)
    trainer.publish(*trainer.names)
    requests = []

    def expected(place: WeightsPlace) -> str:
        requests.append(place)
        return trainer.published(own(0))

    with pytest.raises(
        RefusedWeightsError, match=r"the weights have the digest .*, and the leader published"
    ):
        trainer.pull(1, replica=replica, expected=expected)
    assert requests == [own(1)]
    tensors = {name: replica.tensors[f"model.{name}"] for name in trainer.names}
    assert all(torch.equal(tensors[name], before[name]) for name in trainer.names)


def test_while_nobody_tells_a_digest_nothing_is_taken(trainer: Trainer) -> None:
    trainer.publish()

    def silent(place: WeightsPlace) -> str:
        raise PeerError("the leader is gone")

    with pytest.raises(PeerError, match="the leader is gone"):
        trainer.pull(0, expected=silent)


def damage(trainer: Trainer, step: int) -> None:
    """Flip a byte in the middle of rank 0's block where it lies."""
    point = trainer.group.clients["a"].locate(generation=1, step=step)
    handle = trainer.group.clients["a"].open_block(point.world, step, point.sources[0])
    with Path(handle.path).open("r+b") as file:
        file.seek(HEADER_BYTES + handle.payload_bytes // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_damaged_block_is_refused_and_rebuilt_elsewhere(trainer: Trainer) -> None:
    replica, wanted = Replica(), trainer.publish()
    damage(trainer, 0)
    with pytest.raises(RefusedWeightsError, match="fails its checksum") as refused:
        trainer.pull(0, replica=replica, expected=trainer.published)
    assert refused.value.ranks == {0}
    again = trainer.pull(0, replica=replica, avoid=refused.value.ranks)
    assert same(again, wanted)


def test_a_refresh_that_fails_midway_is_made_up_for_by_the_next(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica()
    trainer.publish()
    trainer.pull(0, replica=replica)
    wanted = trainer.publish(*trainer.names[:7])

    def half(source: Any, deliveries: Any) -> int:
        for _, regions in deliveries[: len(deliveries) // 2]:
            for _, array in regions:
                array[...] = 99
        raise PeerError("gone in the middle")

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.ckpt.recovery.memory_source.MemorySource.scatter", half)
        with pytest.raises(PeerError):
            trainer.pull(1, replica=replica)
    again = trainer.pull(1, replica=replica)
    assert same(again, wanted)
    assert again.nbytes == sum(wanted[name].nbytes for name in trainer.names[:7])


def test_a_rank_of_the_trainers_gets_an_older_version_as_long_as_it_is_kept(
    trainer: Trainer,
) -> None:
    reader = trainer.reader("a")
    session = SimpleNamespace(
        members=(SimpleNamespace(node="a"),),
        sidecar=reader.client,
        key=reader.key,
        roster=lambda: reader.roster,
    )
    run: Any = SimpleNamespace(rank=0, check=lambda: None, _session=session)
    versions = [trainer.publish(*trainer.names) for _ in range(3)]
    found = weights_of(run, trainer.names, 1)
    assert all(torch.equal(found[name], versions[1][name]) for name in trainer.names)
    with pytest.raises(NotFoundError):
        weights_of(run, trainer.names, 0, limit_s=0.0)


def test_a_version_that_is_no_snapshot_any_more_is_read_out_of_what_later_ones_retain(
    retaining: Trainer,
) -> None:
    versions = [retaining.publish(*retaining.names) for _ in range(5)]
    replica, places = Replica(), list[WeightsPlace]()

    def expected(place: WeightsPlace) -> str:
        places.append(place)
        return retaining.published(place)

    for version in (4, 1, 2, 3):
        pulled = retaining.pull(version, retained=2, expected=expected, replica=replica)
        assert same(pulled, versions[version])
    assert [(place.step, place.slot) for place in places] == [(4, None), (3, 1), (3, 0), (3, None)]
    assert replica.tensors.keys() == {f"model.{name}" for name in retaining.names}
    with pytest.raises(NotFoundError, match="step 0"):
        retaining.pull(0, retained=2)
    with pytest.raises(NotFoundError, match="step 1"):
        retaining.pull(1)


def test_a_slot_that_has_another_version_than_it_should_is_not_taken_for_it(
    retaining: Trainer,
) -> None:
    for _ in range(5):
        retaining.publish(*retaining.names)
    with pytest.raises(NotFoundError, match=r"versions \[2, 1\] are retained, not 0"):
        retaining.pull(0, retained=4)


def test_readers_never_hold_up_the_trainer(trainer: Trainer) -> None:
    """A reader maps a sealed slot and pins nothing: it learns when the slot was used again."""
    trainer.publish()
    point = trainer.group.clients["b"].locate(generation=1, step=0)
    with trainer.reader().source(point) as source:
        refs = [ref for index in source.indexes() for ref in index.chunks()]
        chunks = source.read(refs)
        next(chunks)  # it is in the midst of reading
        for _ in range(6):
            trainer.publish(*trainer.names)
        assert trainer.snapshots.stats.taken == 7, "no snapshot waited or was left out"
        with pytest.raises((CorruptError, NotFoundError), match=r"used again|fails its checksum"):
            list(chunks)


def test_a_slot_that_was_used_again_while_it_was_read_is_no_damage(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish()
    scatter = MemorySource.scatter

    def late(source: MemorySource, deliveries: Any) -> int:
        for _ in range(6):
            trainer.publish(*trainer.names)
        return scatter(source, deliveries)

    monkeypatch.setattr(MemorySource, "scatter", late)
    with pytest.raises(NotFoundError):
        trainer.pull(0)
