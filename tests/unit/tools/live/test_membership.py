"""The coordinator tells which nodes are held off; without one that answers nothing is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.embedded import EmbeddedServer
from holdfast.elastic.coordinator.service import RECORD, ServiceRecord
from holdfast.elastic.membership.records import GenerationRecord, Setback
from holdfast.elastic.membership.view import encode, generation_key
from holdfast.tools.live.membership import held_off


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    key = RunKey.new()
    key.save(tmp_path / "key.json")
    server = EmbeddedServer(key, bind="tcp://127.0.0.1:*", journal=None)
    record = ServiceRecord(run="r", job="j", pid=1, address=server.address)
    (tmp_path / RECORD).write_bytes(msgspec.json.encode(record))
    world = SnapshotWorld(
        run="r",
        generation=3,
        peers=(SidecarPeer(node="n0", address=""),),
        rank_nodes=("n0",),
        parity=0,
        keep=1,
    )
    generation = GenerationRecord(
        number=3,
        members=(),
        snapshots=world,
        restore=None,
        reason="",
        nodes={"n0": "a"},
        setbacks={"n0": Setback(losses=1), "n1": Setback(losses=2)},
    )
    coordinator = connect(server.address, key)
    coordinator.put(generation_key("r"), encode(generation))
    coordinator.close()
    yield tmp_path
    server.close()


def test_nodes_that_were_lost_before_and_are_not_in_are_held_off(run_dir: Path) -> None:
    assert held_off(run_dir, ["n0", "n1", "n2"]) == {
        "n1": "it was lost 2 times: it is let in when it has lived for a while"
    }


def test_without_a_coordinator_nothing_is_said(tmp_path: Path) -> None:
    assert held_off(tmp_path, ["n1"]) == {}
