"""Separate sampling processes: their way to the loop, and their handling of samples.

tests/process/rl/test_own_samplers.py shows that their kills cost no token.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from own_loops import LIMITS, PLAN, Job

from holdfast.adapters.rl.sampler_process import _Hand, _roster, attach
from holdfast.adapters.rl.samples.sample import Sample, SampleSink
from holdfast.adapters.rl.samples.trajectory import Delta, Stamp, Trajectory
from holdfast.adapters.rl.samples.unlogged import Unlogged
from holdfast.adapters.rl.server.meeting import Meeting, Offer, is_held
from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.elastic.membership.records import GenerationRecord, Member

STAMPS = (Stamp(generation=1, version=2, count=2),)
BEGUN = Trajectory(
    ordinal=0, sample=1, prompt=(1,), tokens=(3, 4), logprobs=(-0.5, -1.0), stamps=STAMPS
)
HOLDER = """
import sys
from pathlib import Path
from holdfast.adapters.rl.server.meeting import Meeting
from holdfast.ckpt.transport import RunKey
meeting = Meeting(sys.argv[1])
lock = meeting.join(sys.argv[2]) if sys.argv[2:] else meeting.lead(RunKey.new())
print("held", flush=True)
sys.stdin.read()
"""


def offer(*nodes: str, run: str = "r") -> Offer:
    peers = tuple(SidecarPeer(node=node, address=f"tcp://{node}:1") for node in nodes or ("a",))
    world = SnapshotWorld(run=run, generation=4, peers=peers, rank_nodes=("a",), parity=0, keep=2)
    member = Member(rank=0, seat="trainer/0", node="a", incarnation="x", info={"frozen": "no"})
    record = GenerationRecord(
        number=4, members=(member,), snapshots=world, restore=None, reason="because"
    )
    return Offer(run=run, seed=3, plan=PLAN, names=("w",), generation=record, leader="tcp://l:2")


@contextmanager
def holding(directory: Path, *incarnation: str) -> Iterator[subprocess.Popen[str]]:
    """Have another process lead, or be a sampler."""
    command = [sys.executable, "-c", HOLDER, str(directory), *incarnation]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_who_lives_is_known_by_locks_that_end_with_their_process(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path)
    assert not meeting.led()
    lock = meeting.lead(RunKey.new())
    with holding(tmp_path, "x") as process:
        assert meeting.alive() == {"x"}
        process.kill()
        process.wait()
        assert meeting.alive() == set()
        assert not (tmp_path / "samplers" / "x").exists()
    lock.release()
    lock.release()
    with holding(tmp_path):
        assert meeting.led()
    assert not is_held(tmp_path / "nothing")


def test_a_new_leader_takes_back_what_a_former_one_offered_until_it_offers_itself(
    tmp_path: Path,
) -> None:
    loop, sampler = Meeting(tmp_path), Meeting(tmp_path)
    loop.lead(RunKey.new()).release()
    assert sampler.offer() is None
    loop.write(offer())
    assert sampler.offer() == offer()
    key = RunKey.new()
    loop.lead(key).release()
    assert sampler.offer() == offer(), "who knows it keeps to it meanwhile"
    assert Meeting(tmp_path).offer() is None
    assert sampler.key() == key
    loop.write(offer(run="other"))
    loop.end()
    assert sampler.offer() == msgspec.structs.replace(offer(run="other"), over=True)


def test_where_nobody_serves_the_directory_attach_says_so(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match=r"no loop has served it for 0 s; start the loop"):
        attach(tmp_path, dict, wait_s=0.1)
    with pytest.raises(ConfigError, match="log_every_tokens is 0"):
        attach(tmp_path, dict, log_every_tokens=0)
    with holding(tmp_path):
        Meeting(tmp_path).write(offer("a", "b"))
        with pytest.raises(ConfigError, match="node 'c' is not one of the job's: a, b"):
            attach(tmp_path, dict, node="c")


def test_a_sampler_whose_node_is_gone_is_a_newcomer_on_another(tmp_path: Path) -> None:
    with holding(tmp_path):
        meeting = Meeting(tmp_path)
        meeting.write(offer("a", "b"))
        place = attach(tmp_path, dict, node="b")._place
        before = place.incarnation
        assert (place.node, place.sidecar) == ("b", "tcp://b:1")
        meeting.write(offer("a", "b"))
        assert place.roster() == _roster(offer("a", "b"))
        assert place.incarnation == before
        meeting.write(offer("a"))
        assert place.roster().generation is not None
        assert (place.node, place.sidecar) == ("a", "tcp://a:1")
        assert place.incarnation != before
        meeting.write(offer("a", run="next"))
        assert place.over, "another job has taken its place"
        place.close()


def test_the_leaders_address_takes_the_place_of_what_rank_0_announced() -> None:
    record = _roster(offer()).generation
    assert record is not None
    assert record.members[0].info == {"rollout": "tcp://l:2"}


class Keeper(SampleSink):
    """Collects the tokens that are added to samples."""

    limits, seed, generation = LIMITS, 3, 5

    def __init__(self) -> None:
        self.heard: list[Delta] = []

    def added(self, sample: Sample, delta: Delta) -> None:
        self.heard.append(delta)


def hand(*, pinned: bool = True) -> tuple[Any, Keeper]:
    keeper = Keeper()
    found = _Hand(
        lambda start, v: Sample(keeper, start, version=v),
        dict,
        pinned=pinned,
        unlogged=Unlogged(1, lambda deltas: None),
    )
    found.load({}, version=2, generation=5)
    return found, keeper


def test_what_another_began_is_gone_on_with_and_in_this_log_from_its_beginning() -> None:
    work, keeper = hand()
    work.put(BEGUN)
    (sample,) = work.arrivals()
    assert (work.arrivals(), sample.tokens, sample.version) == ([], (3, 4), 2)
    (logged,) = work.take_deltas()
    assert (logged.start, logged.tokens, logged.stamps) == (0, (3, 4), STAMPS)
    sample.extend([5], [-0.25])
    ((delta),) = keeper.heard
    assert (delta.start, delta.tokens) == (2, (5,))
    assert (work.progress(), work.oldest()) == ({(0, 1): 3}, {(0, 1): 2})


@pytest.mark.parametrize("how", ["drop", "unload"])
def test_a_sample_that_is_given_up_takes_nothing_more_and_is_finished(how: str) -> None:
    work, keeper = hand()
    work.put(BEGUN)
    (sample,) = work.arrivals()
    work.drop({(0, 1), (7, 7)}) if how == "drop" else work.unload()
    assert sample.finished
    assert sample.given_up
    sample.extend([5], [-0.25])
    assert (keeper.heard, sample.tokens, work.running()) == ([], (3, 4), [])
    assert work.version == (2 if how == "drop" else None)


def test_weights_change_under_samples_at_work_only_where_they_may_and_are_asked_for() -> None:
    work, _ = hand()
    work.put(BEGUN)
    with pytest.raises(RuntimeError, match="version 3 offered while version 2 is in use"):
        work.load({}, version=3, generation=5)
    work, _ = hand(pinned=False)
    assert not work.renewable
    work.wanted = 1
    assert work.renewable
    work.put(BEGUN)
    work.load({}, version=3, generation=5)
    assert [sample.version for sample in work.arrivals()] == [3]


def test_a_loop_that_others_sample_for_offers_nothing_before_its_first_batch(
    tmp_path: Path,
) -> None:
    rollouts = Job().enter("p")
    model: Any = None
    refused = pytest.raises(ConfigError, match="cannot be used beside it")
    with rollouts.serve(tmp_path / "meet", model), refused:
        next(rollouts.samples())
    assert not (tmp_path / "meet").exists(), "as in a rehearsal, which gets no further"
