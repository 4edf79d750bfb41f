"""The worker's channel against a hand-driven agent end, and its messages."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.ckpt.errors import HoldfastError
from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.channel.base import AgentChannel, WorkerConfig
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.errors import Stopped
from holdfast.elastic.events import StepDone, decode
from holdfast.elastic.membership import messages
from holdfast.elastic.membership.phases import WorkerPhase
from holdfast.elastic.membership.records import (
    GenerationRecord,
    JobSpec,
    Member,
    NodeRecord,
    Roster,
)
from holdfast.elastic.processes.control_page import EVERY_GENERATION, ControlPage


def generation(number: int) -> GenerationRecord:
    world = SnapshotWorld(
        run="r",
        generation=number,
        peers=(SidecarPeer(node="n0", address=f"tcp://x:{number}"),),
        rank_nodes=("n0",),
        parity=0,
        keep=1,
    )
    member = Member(rank=0, seat="trainer/0", node="n0", incarnation="i")
    return GenerationRecord(
        number=number, members=(member,), snapshots=world, restore=None, reason="test"
    )


class Pair:
    """A channel and the agent's ends of it."""

    def __init__(self, directory: Path) -> None:
        RunKey.new().save(directory / "key.json")
        self.page = ControlPage.create("test")
        self.socket, theirs = socket.socketpair()
        self.channel = AgentChannel(
            WorkerConfig(
                channel_fd=theirs.detach(),
                page_fd=os.dup(self.page.fd),
                run="r",
                node="n0",
                seat="trainer/0",
                attempt=1,
                incarnation="i",
                sidecar="tcp://x:0",
                key_file=str(directory / "key.json"),
            )
        )

    def send(self, message: messages.FromAgent) -> None:
        self.socket.sendall(messages.encode(message))

    def heard(self) -> messages.FromWorker:
        line = b""
        while not line.endswith(b"\n"):
            line += self.socket.recv(1)
        return messages.from_worker.decode(line)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made  # its socket stays open: its end would end this very process
    _kept.append(made)


_kept: list[Pair] = []


def test_what_a_worker_says_arrives(pair: Pair) -> None:
    pair.channel.ready(after=3, spec=JobSpec(parity=2), info={"store": "h:1"})
    assert pair.heard() == messages.Ready(after=3, spec=JobSpec(parity=2), info={"store": "h:1"})
    pair.channel.emit(StepDone(step=4, seconds=0.5))
    said = pair.heard()
    assert isinstance(said, messages.Emit)
    event = decode(said.event)
    assert event == StepDone(step=4, seconds=0.5, time_s=event.time_s)
    assert abs(event.time_s - time.time()) < 5
    pair.channel.done({"hash": "x"})
    assert pair.heard() == messages.Done(result={"hash": "x"})
    pair.channel.fail("no", user_error=True)
    assert pair.heard() == messages.Fail(message="no", user_error=True)
    assert pair.channel.role == "trainer"


def test_the_newest_generation_is_awaited(pair: Pair) -> None:
    for number in (1, 2, 3):
        pair.send(messages.Begin(record=generation(number)))
    while pair.channel.await_generation(after=0).number < 3:
        time.sleep(0.001)
    assert pair.channel.sidecar == "tcp://x:3"


def test_a_fence_is_seen_at_once_and_covers_older_generations(pair: Pair) -> None:
    assert not pair.channel.fenced(1)
    pair.page.set_fence(2)
    assert pair.channel.fenced(1) and pair.channel.fenced(2) and not pair.channel.fenced(3)
    pair.page.set_fence(1)
    assert pair.channel.fenced(2)


def test_a_stop_reaches_every_wait(pair: Pair) -> None:
    caught = []

    def wait() -> None:
        try:
            pair.channel.await_generation(after=0)
        except Stopped as error:
            caught.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    pair.page.set_fence(EVERY_GENERATION)
    pair.send(messages.Stop(reason="complete"))
    thread.join(timeout=5)
    assert caught == ["complete"]
    assert pair.channel.stopped() and pair.channel.fenced(10**12)
    with pytest.raises(Stopped):
        pair.channel.await_roster(after=-1, timeout_s=5)


def test_the_roster_is_counted(pair: Pair) -> None:
    assert pair.channel.await_roster(after=0, timeout_s=0.01) == 0
    node = NodeRecord(node="n0", incarnation="a", domain="d", sidecar="tcp://y:1", slots={})
    pair.send(messages.RosterChanged(roster=Roster(nodes=(node,))))
    assert pair.channel.await_roster(after=0, timeout_s=5) == 1
    assert pair.channel.roster().nodes == (node,)
    assert pair.channel.sidecar == "tcp://y:1"


def test_beats_cross_the_page(pair: Pair) -> None:
    assert pair.page.last_beat().count == 0
    pair.channel.beat(step=7, phase=WorkerPhase.COMPUTE)
    beat = pair.page.last_beat()
    assert (beat.count, beat.step, beat.phase) == (1, 7, WorkerPhase.COMPUTE)
    assert 0 <= time.monotonic_ns() - beat.at_ns < 5e9


def test_lines_are_cut_wherever_the_bytes_are(pair: Pair) -> None:
    line = messages.encode(messages.Begin(record=generation(5)))
    for byte in line[:50]:
        pair.socket.sendall(bytes([byte]))
    pair.socket.sendall(line[50:])
    assert pair.channel.await_generation(after=4).number == 5


def test_a_line_without_end_is_refused() -> None:
    reader = messages.LineReader(limit_bytes=10)
    assert reader.feed(b"abc\nde") == [b"abc"]
    assert reader.feed(b"f\n\n") == [b"def", b""]
    with pytest.raises(HoldfastError, match="more than 10 bytes"):
        reader.feed(b"x" * 11)


def test_the_control_plane_does_without_torch_and_all_else_that_takes_long_to_import() -> None:
    modules = (
        "holdfast.elastic.agent.loop, holdfast.elastic.launch.local, "
        "holdfast.elastic.channel.base, holdfast.elastic.channel.solo, holdfast.tools.commands.run"
    )
    code = (
        f"import sys, {modules}\n"
        "print(sys.modules.keys() & {'torch', 'asyncio', 'ssl', 'holdfast.ckpt.sidecar.server'})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_a_worker_parks_by_itself_when_its_agent_does_not_renew(pair: Pair) -> None:
    assert not pair.channel.fenced(1), "no lease, no limit"
    pair.page.extend(time.monotonic_ns() + 10**12)
    assert not pair.channel.fenced(1)
    pair.page.extend(time.monotonic_ns() - 1)
    assert pair.channel.fenced(1)
    pair.page.extend(time.monotonic_ns() + 10**12)
    assert not pair.channel.fenced(1)


def test_a_pause_says_how_long_it_may_be_silent(pair: Pair) -> None:
    pulse = Pulse(pair.channel)
    pulse.set(WorkerPhase.COMPUTE, step=3)
    with pulse.phase(WorkerPhase.PAUSE, limit_s=90.0):
        beat = pair.page.last_beat()
        assert (beat.phase, beat.limit_s) == (WorkerPhase.PAUSE, 90.0)
        pulse.waiting(True)
        assert pair.page.last_beat().phase is WorkerPhase.WAIT
        pulse.waiting(False)
        assert pair.page.last_beat().limit_s == 90.0
    beat = pair.page.last_beat()
    assert (beat.phase, beat.limit_s, beat.step) == (WorkerPhase.COMPUTE, 0.0, 3)


def test_the_longest_silence_of_computing_is_remembered(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("holdfast.elastic.channel.pulse.time.monotonic", lambda: now_s)
    pulse = Pulse(pair.channel)
    for seconds, phase in (
        (9.0, WorkerPhase.COMPUTE),
        (2.0, WorkerPhase.WAIT),
        (7.0, WorkerPhase.COMPUTE),
    ):
        now_s += seconds
        pulse.set(phase)
    now_s += 1.0
    pulse.beat()
    assert pulse.take_quiet_s() == 2.0
    assert pulse.take_quiet_s() == 0.0


def test_a_worker_is_asked_to_stand_for_one_generation_and_says_so(pair: Pair) -> None:
    pair.page.set_halt(2)
    assert [pair.channel.halts(generation) for generation in (1, 2, 3)] == [False, True, False]
    assert not pair.channel.leaving()
    pair.channel.halted(generation=2, step=7)
    assert pair.heard() == messages.Halted(generation=2, step=7)


def test_a_worker_hands_over_and_is_told_to_leave(pair: Pair) -> None:
    assert not pair.channel.leaving()
    pair.page.set_leaving()
    assert pair.channel.leaving()
    pair.channel.handed_over(generation=2, step=7)
    assert pair.heard() == messages.HandedOver(generation=2, step=7)
