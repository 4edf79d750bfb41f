"""Sidecar processes that are killed, wiped, restarted, orphaned: nothing is lost or left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
from sidecar_group import (
    DEADLINE_S,
    SIZES,
    SidecarGroup,
    inventories,
    sidecar_group,
    wait_until,
    write_step,
)

from holdfast.ckpt.descriptors import descriptor_of
from holdfast.ckpt.errors import FencedError, NotFoundError, PeerError, UnsafePathError
from holdfast.ckpt.memory.arena import SlotFile, arena_path
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.sidecar.config import SidecarConfig
from holdfast.ckpt.sidecar.launch import start_sidecar
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.inbox import Inbox
from holdfast.elastic.agent.sidecar import SidecarEvents, SidecarKeeper
from holdfast.elastic.processes.node_sidecar import SidecarPlan
from holdfast.tools.leftovers import leftovers


@pytest.fixture
def one(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a") as group:
        yield group


@pytest.fixture
def three(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c") as group:
        yield group


def test_a_lost_nodes_block_is_rebuilt_bit_for_bit(three: SidecarGroup) -> None:
    lost, world = "b", three.adopt()
    write_step(three, world, 1)
    payloads = write_step(three, world, 2)
    rank = world.rank_nodes.index(lost)
    three.kill(lost, wipe=True)
    points, reason = restore_points(inventories(three))
    point = points[0]
    assert (point.step, "rebuilt" in reason) == (2, True)
    three.adopt(generation=2, restore=point)
    for source in point.sources:
        client = three.clients[source.node]
        handle = client.open_block(point.world, point.step, source)
        slot = SlotFile.open(handle.path)
        assert bytes(slot.block(handle.payload_bytes)) == payloads[source.rank]
        (part,) = client.read(point.world, point.step, source.rank, [(0, SIZES[source.rank])])
        assert part == payloads[source.rank]
    helper = point.sources[rank].node
    assert three.clients[helper].status()["counters"]["rebuilt"] == 1


def test_a_writer_killed_in_the_middle_leaves_nothing_behind(one: SidecarGroup) -> None:
    one.adopt()
    client = one.clients["a"]
    code = (
        "import os,sys,time;from pathlib import Path;"
        "from holdfast.ckpt.memory.arena import SlotFile;"
        "from holdfast.ckpt.sidecar.client import SidecarClient;"
        "from holdfast.ckpt.transport import RunKey;"
        "c=SidecarClient(sys.argv[1],RunKey.load(Path(sys.argv[2])));"
        "g=c.acquire(generation=1,step=1,rank=0,size_bytes=1<<20,timeout_s=5);"
        "s=SlotFile.open(g.path);s.block(1<<19)[:]=bytes([7])*(1<<19);"
        "print('half',flush=True);time.sleep(60)"
    )
    argv = [sys.executable, "-c", code, one.processes["a"].address, str(one.key_file)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"half\n"
        worker.send_signal(signal.SIGKILL)
    assert client.status()["slots"]["writing"] == 1
    assert client.inventory().blocks == ()
    world = one.adopt(generation=2)
    assert client.status()["slots"]["writing"] == 0
    write_step(one, world, 1, sizes=(1000,))


def test_a_successor_takes_the_blocks_of_a_crashed_sidecar_over(three: SidecarGroup) -> None:
    world = three.adopt()
    payloads = write_step(three, world, 1)
    three.kill("b", wipe=False)
    three.start("b")
    point = restore_points(inventories(three))[0][0]
    assert [source.rebuilt for source in point.sources] == [False, False, False]
    assert three.clients["b"].status()["counters"]["readopted"] == 1
    with pytest.raises(FencedError):
        three.clients["b"].acquire(generation=0, step=1, rank=1, size_bytes=1, timeout_s=1)
    three.adopt(generation=2, restore=point)
    assert three.clients["b"].read(world, 1, 1, [(0, SIZES[1])])[0] == payloads[1]


def test_a_lone_sidecars_successor_knows_the_restore_point(one: SidecarGroup) -> None:
    world = one.adopt()
    payloads = write_step(one, world, 4, sizes=(9000,))
    one.kill("a", wipe=False)
    one.start("a")
    point = restore_points(inventories(one))[0][0]
    assert (point.step, point.world.generation) == (4, 1)
    one.adopt(generation=2, restore=point)
    assert one.clients["a"].read(world, 4, 0, [(0, 9000)])[0] == payloads[0]


@pytest.mark.parametrize("how", ["lifeline", "sigterm", "stop"])
@pytest.mark.parametrize("has_holder", [False, True])
def test_no_shared_memory_is_left_unless_somebody_holds_it(
    one: SidecarGroup, how: str, has_holder: bool
) -> None:
    write_step(one, one.adopt(), 1, sizes=(1000,))
    process = one.processes["a"]
    assert one.leftovers()
    if not has_holder:
        process.release()
    if how == "lifeline":
        assert process.process.stdin is not None
        process.process.stdin.close()
    elif how == "sigterm":
        os.kill(process.pid, signal.SIGTERM)
    else:
        one.clients["a"].stop()
    assert process.process.wait(DEADLINE_S) == 0
    assert bool(one.leftovers()) == (has_holder and how != "stop")
    process.stop()
    assert one.leftovers() == []


def test_a_sidecar_whose_parent_was_killed_removes_its_memory(tmp_path: Path) -> None:
    group = SidecarGroup(tmp_path)
    code = (
        "import sys,time;from pathlib import Path;"
        "from holdfast.ckpt.sidecar.launch import start_sidecar;"
        "p=start_sidecar(run=sys.argv[1],node='a',key_file=Path(sys.argv[2]));"
        "print(p.pid,flush=True);time.sleep(60)"
    )
    argv = [sys.executable, "-c", code, group.run, str(group.key_file)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert group.leftovers()
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not group.leftovers(), "the arena is removed")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the sidecar is gone")


def test_a_sidecar_whose_parent_dies_while_it_starts_ends_without_a_word(tmp_path: Path) -> None:
    group = SidecarGroup(tmp_path)
    config = SidecarConfig(
        run=group.run,
        node="a",
        key_file=str(group.key_file),
        arena_dir=str(arena_path(group.run, "a")),
    )
    parent, starting = os.pipe()
    os.close(parent)
    with descriptor_of(msgspec.json.encode(config)) as fd:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "holdfast.ckpt.sidecar", "--config-fd", str(fd)],
            stdin=subprocess.DEVNULL,
            stdout=starting,
            stderr=subprocess.PIPE,
            pass_fds=(fd,),
            check=False,
        )
    os.close(starting)
    assert ended.returncode == 0
    assert b"Traceback" not in ended.stderr, ended.stderr.decode()
    assert group.leftovers() == []


def test_a_sidecar_writes_no_log_through_a_link(tmp_path: Path) -> None:
    group, theirs = SidecarGroup(tmp_path), tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "logs").symlink_to(theirs)
    with pytest.raises(UnsafePathError, match="logs: not a directory"):
        start_sidecar(run=group.run, node="a", key_file=group.key_file, run_dir=tmp_path)
    assert list(theirs.iterdir()) == []
    assert group.leftovers() == []


def test_a_sidecar_that_cannot_start_says_why(tmp_path: Path) -> None:
    group = SidecarGroup(tmp_path)
    group.key_file.write_text("nonsense")
    with pytest.raises(PeerError, match="no usable run key"):
        group.start("a")
    assert group.leftovers() == []


def test_a_start_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    group = SidecarGroup(tmp_path)
    given_up = os.eventfd(1)
    began_s = time.monotonic()
    with pytest.raises(PeerError, match="start of the sidecar was cancelled"):
        start_sidecar(run=group.run, node="a", key_file=group.key_file, give_up_fd=given_up)
    os.close(given_up)
    assert time.monotonic() - began_s < DEADLINE_S
    assert leftovers(group.run, timeout_s=DEADLINE_S) == []


def test_a_keeper_that_stops_while_its_sidecar_starts_leaves_nothing(tmp_path: Path) -> None:
    group = SidecarGroup(tmp_path)
    key = RunKey.load(group.key_file)
    plan = SidecarPlan(run=group.run, node="a", key=key, key_file=group.key_file)
    unheard = cast("SidecarEvents", None)  # nobody takes what is in the inbox
    keeper = SidecarKeeper(plan, inbox=Inbox(), events=unheard, stop_grace_s=1.0)
    keeper.check()
    keeper.stop()
    assert keeper.pid == 0
    assert leftovers(group.run, timeout_s=DEADLINE_S) == []


def test_a_sidecar_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys, holdfast.ckpt.sidecar.__main__, holdfast.ckpt.sidecar.client;"
        "import holdfast.ckpt.sidecar.launch, holdfast.ckpt.checkpoints.commit;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_log_outlives_its_writer_and_its_node(three: SidecarGroup) -> None:
    three.adopt()
    writer = three.clients["b"]
    assert writer.log_open("tokens") == 0
    records = [bytes([n]) * n for n in range(1, 50)]
    for at in range(0, len(records), 7):
        end = writer.log_append("tokens", records[at : at + 7])
    assert end == len(records)
    assert three.clients["a"].log_read("tokens", node="b") == records
    assert writer.log_protected("tokens", at_least=end, timeout_s=DEADLINE_S) == end
    three.kill("b", wipe=True)
    three.adopt(generation=2, rank_nodes=("a", "c"))
    assert three.clients["c"].log_read("tokens", node="b") == records
    assert three.clients["a"].log_read("tokens", node="b") == records
    with pytest.raises(NotFoundError, match="has log 'words' of node b"):
        three.clients["a"].log_read("words", node="b")
