"""A job is found at a coordinator and followed there; what cannot be found is refused by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles import fakes

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.embedded import EmbeddedCoordinator, EmbeddedServer
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.launch.joint import SharedJobRecord
from holdfast.elastic.membership.records import JobOutcome, WorkerState
from holdfast.elastic.membership.view import encode, generation_key, node_key, outcome_key
from holdfast.tools import cli
from holdfast.tools.live.follow import Follower
from holdfast.tools.live.members.reader import MembersReader

DEADLINE_S = 60.0


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key.json"
    RunKey.new().save(path)
    return path


@pytest.fixture
def server(key_file: Path) -> Iterator[EmbeddedServer]:
    found = EmbeddedServer(RunKey.load(key_file))
    yield found
    found.close()


@pytest.fixture
def table(server: EmbeddedServer, key_file: Path) -> Iterator[EmbeddedCoordinator]:
    found = EmbeddedCoordinator(server.address, RunKey.load(key_file))
    yield found
    found.close()


def put_job(table: EmbeddedCoordinator, run: str, *, name: str = "", ended: bool = False) -> None:
    nodes = [fakes.node(f"n{i}", fakes.worker(f"trainer/{i}", WorkerState.ACTIVE)) for i in (0, 1)]
    record = fakes.generation(2, nodes, ranks=[(each.node, each.workers[0]) for each in nodes])
    for each in nodes:
        table.put(node_key(run, each.node), encode(each))
    table.put(generation_key(run), encode(record))
    if name:
        shared = SharedJobRecord(run=run, machines=2, wanted={"trainer": 2}, ended=ended)
        table.put(f"jobs/{name}/record", encode(shared))
        table.put(f"jobs/{name}/launchers/0", "{}")


def reader(server: EmbeddedServer, key_file: Path, job: str | None = None) -> MembersReader:
    return MembersReader(server.address, now=time.time, key_file=str(key_file), job=job)


def until(look: object, what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not look():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def test_the_only_job_is_followed(
    server: EmbeddedServer, table: EmbeddedCoordinator, key_file: Path
) -> None:
    put_job(table, "r-1", name="job")
    before = table.range("")
    found = reader(server, key_file)
    assert (found.run, found.roll().state, found.roll().wanted) == (
        "r-1",
        "training",
        {"trainer": 2},
    )
    assert found.listed()["n1"].address == "sim://n1/1"
    assert table.range("") == before, "nothing was written"
    table.delete(node_key("r-1", "n1"))
    until(lambda: found.roll().nodes[1].state == "lost", "the loss")
    table.put(outcome_key("r-1"), encode(JobOutcome(ok=True, message="all done")))
    table.delete(node_key("r-1", "n0"))
    table.delete(outcome_key("r-1"))
    until(lambda: found.over, "the end, though its keys are gone")
    until(lambda: not found.listed(), "the records are gone")
    assert (found.roll().state, found.roll().message) == ("done", "all done")
    found.close()


def test_a_coordinator_that_goes_away_is_told_and_the_last_roll_stays(
    server: EmbeddedServer, table: EmbeddedCoordinator, key_file: Path
) -> None:
    put_job(table, "r-1")
    found = reader(server, key_file)
    follower = Follower(members=found)
    assert follower.view().state == "training"
    server.close()
    found.ask()
    assert "does not answer" in found.silence
    view = follower.view()
    assert (view.state, [node.node for node in view.nodes]) == ("silent", ["n0", "n1"])
    found.close()


def test_one_of_several_jobs_is_named(
    server: EmbeddedServer, table: EmbeddedCoordinator, key_file: Path
) -> None:
    put_job(table, "r-1", name="first")
    put_job(table, "r-2")
    put_job(table, "r-0", name="old", ended=True)
    with pytest.raises(NotFoundError, match="has 2 jobs: first, r-2; name one with --job"):
        reader(server, key_file)
    for name, run in (("first", "r-1"), ("r-2", "r-2"), ("old", "r-0")):
        found = reader(server, key_file, name)
        assert found.run == run
        found.close()
    with pytest.raises(NotFoundError, match="has no job fist; there is first, old, r-0, r-1, r-2"):
        reader(server, key_file, "fist")


def test_no_job_no_key_and_no_coordinator_are_told_apart(
    server: EmbeddedServer, table: EmbeddedCoordinator, key_file: Path, tmp_path: Path
) -> None:
    table.put("torchrun/x/nodes/a", "{}")
    with pytest.raises(NotFoundError, match="has no job; a job that torchrun starts"):
        reader(server, key_file)
    put_job(table, "r-0", name="old", ended=True)
    with pytest.raises(NotFoundError, match="the job old is over"):
        reader(server, key_file)
    absent = tmp_path / "absent.json"
    with pytest.raises(ConfigError, match="give --key-file the file that the job's launchers have"):
        reader(server, absent)
    assert not absent.exists(), "a reader makes no key"
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        MembersReader("head:port", now=time.time, key_file=str(key_file))


def test_another_key_is_not_let_in(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.tools.live.members.finding.TIMEOUT_S", 0.3)
    other = tmp_path / "other.json"
    RunKey.new().save(other)
    with pytest.raises(NotFoundError, match="that --key-file is the job's key"):
        reader(server, other)


def test_the_state_now_is_a_few_lines(
    server: EmbeddedServer,
    table: EmbeddedCoordinator,
    key_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_job(table, "r-1")
    words = ["top", "--once", "--coordinator", server.address, "--key-file", str(key_file)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "training: step not known, generation 2, 2 trainers" in said
    assert "goodput" not in said.partition("\n")[0]
    assert "generation 2 after change (because)" in said
    assert "need events: give the job's run directories too" in said
