"""Leftovers of a job in its coordinator and among its checkpoints are reported by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.checkpoints import sample_arrays, write_checkpoint
from doubles.memory_coordinator import MemoryCoordinator

from holdfast.ckpt.checkpoints.catalog import step_folder
from holdfast.ckpt.checkpoints.unreferenced import Unreferenced, UnreferencedKind
from holdfast.elastic.coordinator.clock import VirtualClock
from holdfast.elastic.events import CheckpointFailed, encode
from holdfast.elastic.membership.view import generation_key, node_key
from holdfast.tools.chaos.real.jobs import JobFolders, words
from holdfast.tools.chaos.real.keys import keys_of, left_keys
from holdfast.tools.chaos.real.objects import Objects, is_leak, places_named
from holdfast.tools.chaos.scenarios.scenario import Workload

RUN = "run-1"


def left_in(coordinator: MemoryCoordinator, clock: VirtualClock) -> list[str]:
    return keys_of(coordinator, RUN, lease_s=5.0, now_s=clock.now_s, sleep=clock.advance)


def test_a_key_without_a_lease_is_left_behind_at_once() -> None:
    clock = VirtualClock()
    coordinator = MemoryCoordinator(clock=clock)
    coordinator.put("other-run/generation", "{}")
    assert left_in(coordinator, clock) == []
    coordinator.put(generation_key(RUN), "{}")
    assert left_in(coordinator, clock) == [
        "left behind: key run-1/job/generation in the coordinator",
    ]
    assert clock.now_s() == 0.0


def test_a_key_of_a_lease_has_until_the_lease_ends() -> None:
    clock = VirtualClock()
    coordinator = MemoryCoordinator(clock=clock)
    coordinator.put(node_key(RUN, "a"), "{}", lease=coordinator.grant(3.0))
    assert left_in(coordinator, clock) == []
    assert 3.0 <= clock.now_s() < 4.0
    coordinator.put(node_key(RUN, "a"), "{}", lease=coordinator.grant(60.0))
    (said,) = left_in(coordinator, clock)
    assert "run-1/nodes/a" in said and "has not ended in 5 s" in said


def test_an_embedded_coordinator_ends_with_the_job() -> None:
    assert left_keys("tcp://127.0.0.1:1", RUN) == left_keys("", "") == []


def test_an_etcd_that_does_not_answer_is_told() -> None:
    pytest.importorskip("aetcd")
    (said,) = left_keys("etcd://127.0.0.1:1", RUN)
    assert said.startswith("cannot list the keys")


def test_places_are_found_in_the_words_of_a_job(tmp_path: Path) -> None:
    load = Workload(
        command=("{python}", "train.py", "--out={folder}/saved", "--to=s3://bucket/run"),
        env={"ROOT": "file:///data/run"},
        settings={"checkpoint": "s3://bucket/other", "every": 5, "more": ["/data/third"]},
    )
    place = JobFolders.made(tmp_path, history="history", work="work")
    named = places_named(words(load, place, source=tmp_path))
    assert named[1:] == [
        f"{place.work}/saved",
        "s3://bucket/run",
        "file:///data/run",
        "s3://bucket/other",
        "/data/third",
    ]


@pytest.mark.parametrize(
    ("kind", "ended_well", "hurt", "leak"),
    [
        (UnreferencedKind.FILE, True, True, True),
        (UnreferencedKind.FILE, False, True, True),
        (UnreferencedKind.SAVE, True, True, True),
        (UnreferencedKind.SAVE, False, True, False),
        (UnreferencedKind.ABANDONED, True, True, True),
        (UnreferencedKind.BEGUN, True, False, True),
        (UnreferencedKind.BEGUN, True, True, False),
    ],
)
def test_what_may_be_left_depends_on_how_a_job_ended(
    kind: UnreferencedKind, ended_well: bool, hurt: bool, leak: bool
) -> None:
    each = Unreferenced(where="x", step=5, kind=kind)
    assert is_leak(each, ended_well=ended_well, hurt=hurt, not_saved=set()) is leak
    verdict = is_leak(each, ended_well=ended_well, hurt=hurt, not_saved={5})
    assert verdict is (kind is UnreferencedKind.FILE)


def test_what_lies_among_the_checkpoints_of_a_job_is_told_unless_it_was_there(
    tmp_path: Path,
) -> None:
    work, other = tmp_path / "work", tmp_path / "other"
    write_checkpoint(other, sample_arrays(), step=1)
    (other / step_folder(1) / "old").write_bytes(b"of an earlier job")
    objects = Objects(["train.py", f"--checkpoint={other}", "/dev/null"], work)
    write_checkpoint(work / "saved", sample_arrays(), step=5)
    assert objects.left(ended_well=True, hurt=True) == []
    for root, step in ((other, 1), (work / "saved", 5)):
        (root / step_folder(step) / "data" / "stray.pack").write_bytes(b"x")
    said = objects.left(ended_well=True, hurt=True)
    assert said == [
        f"left behind: {root}/data/stray.pack: no committed step refers to it"
        for root in (work / "saved" / step_folder(5), other / step_folder(1))
    ]


def test_steps_that_were_told_to_be_not_saved_may_be_unfinished(tmp_path: Path) -> None:
    objects = Objects([], tmp_path)
    data = tmp_path / "saved" / step_folder(5) / "data"
    data.mkdir(parents=True)
    (data / "half.pack").write_bytes(b"x")
    assert objects.left(ended_well=True, hurt=True) != []
    failed = CheckpointFailed(step=5, error="full", in_a_row=1, fatal=False, newest=-1)
    (tmp_path / "events-a.jsonl").write_bytes(encode(failed) + b"\n")
    assert objects.left(ended_well=True, hurt=True) == []


def test_a_place_that_cannot_be_looked_at_is_told(tmp_path: Path) -> None:
    (said,) = Objects(["--to=s3:///no-bucket"], tmp_path).left(ended_well=True, hurt=False)
    assert said.startswith("cannot list the files") and "s3:///no-bucket" in said
