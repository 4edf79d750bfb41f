"""The directories of a job's launchers are read as one; others, and copies, are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from large_run import BEGIN_S, start, step, training, write

from holdfast.ckpt.errors import NotFoundError
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import Event, JobEnded, JobStarted
from holdfast.elastic.events.log import events_file
from holdfast.elastic.events.wire import encode
from holdfast.tools.live.directories import RunDirectories
from holdfast.tools.live.follow import Follower
from holdfast.tools.live.view import RunView


def apart(directory: Path) -> list[Path]:
    """Write a run of two nodes as two launchers do, each into a directory of its own."""
    both = directory / "both"
    write(both, training(2, steps=20))
    found = []
    for number in (0, 1):
        run_dir = directory / f"machine{number}"
        run_dir.mkdir()
        shutil.copy(events_file(both, f"node{number}"), run_dir)
        begin = JobStarted(run="large", nodes=(f"node{number}",), wanted={"trainer": 2})
        tell(run_dir, begin, at_s=BEGIN_S + number)
        found.append(run_dir)
    shutil.rmtree(both)
    return found


def tell(run_dir: Path, event: Event, *, at_s: float) -> None:
    about = {"node": "launcher", "source": "launcher", "time_s": at_s}
    values = {name: getattr(event, name) for name in event.__struct_fields__} | about
    with events_file(run_dir, "launcher").open("ab") as file:
        file.write(encode(type(event)(**values)) + b"\n")


def seen(follower: Follower) -> RunView:
    while follower.read():
        pass
    return follower.view()


def test_the_directories_of_two_machines_are_one_run(tmp_path: Path) -> None:
    first, second = apart(tmp_path)
    view = seen(Follower(first, second))
    assert (view.step, view.world, view.timed) == (20, 2, True)
    assert [node.node for node in view.nodes] == ["node0", "node1"]
    assert view.counts["step"] == 20
    again = Follower(second, first, second)
    assert again.run_dirs == (second, first)
    assert seen(again).counts == view.counts


def test_a_copy_is_refused(tmp_path: Path) -> None:
    first, second = apart(tmp_path)
    shutil.copytree(first, tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"have the same events .*: give one of them"):
        RunDirectories([first, second, tmp_path / "copy"])


def test_directories_of_different_jobs_are_refused(tmp_path: Path) -> None:
    first, _ = apart(tmp_path)
    other = tmp_path / "other"
    write(other, start(1, begin_s=BEGIN_S + 7))
    events_file(other, "launcher").unlink()
    tell(other, JobStarted(run="another", nodes=("n",)), at_s=BEGIN_S)
    with pytest.raises(ConfigError, match=r"are of different jobs \(large and another\)"):
        RunDirectories([first, other])
    with pytest.raises(NotFoundError, match="no such directory"):
        RunDirectories([first, tmp_path / "nowhere"])


def test_a_launcher_that_gives_up_ends_its_machine_and_not_the_job(tmp_path: Path) -> None:
    first, second = apart(tmp_path)
    follower = Follower(first, second)
    failed = "every node of this machine is lost"
    tell(second, JobEnded(ok=False, message=failed), at_s=BEGIN_S + 100)
    assert seen(follower).ended_s is None
    tell(first, JobEnded(ok=False, message="stopped by the user"), at_s=BEGIN_S + 200)
    view = seen(follower)
    assert (view.state, view.message) == ("failed", "stopped by the user")
    assert view.counts["job_ended"] == 2


def test_a_launcher_that_begins_again_goes_on(tmp_path: Path) -> None:
    first, second = apart(tmp_path)
    follower = Follower(first, second)
    tell(second, JobEnded(ok=False, message="it broke"), at_s=BEGIN_S + 100)
    tell(second, JobStarted(run="large", nodes=("node1",)), at_s=BEGIN_S + 110)
    tell(first, JobEnded(ok=True, message=""), at_s=BEGIN_S + 200)
    assert seen(follower).state == "done"


def test_a_failure_is_held_back_while_others_are_known_to_go_on(tmp_path: Path) -> None:
    first, _ = apart(tmp_path)
    tell(first, JobEnded(ok=False, message="it broke"), at_s=BEGIN_S + 100)
    found = RunDirectories([first])
    kinds = [event.kind for events in found.new(confirmed=False) for event in events]
    assert "job_ended" not in kinds
    assert [event.kind for events in found.new() for event in events] == ["job_ended"]


def test_a_run_without_the_steps_of_rank_0_says_so(tmp_path: Path) -> None:
    write(tmp_path, iter([*start(2), *(step(n, 1, at_s=BEGIN_S + n, rank=1) for n in range(99))]))
    view = seen(Follower(tmp_path))
    assert (view.timed, view.step) == (False, 98)
