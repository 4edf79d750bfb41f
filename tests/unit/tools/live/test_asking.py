"""The nodes of a job are asked for their status; without a job the reason is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.ckpt.errors import NotFoundError, PeerError
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.reporting import NodeProcesses, Reporter, read_all_processes
from holdfast.elastic.events import JobEnded
from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.tools.live.asking import ask


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere: no such directory; give the directory"):
        ask(tmp_path / "nowhere")


def test_a_directory_without_a_job_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no job was started here \(there is no key.json\)"):
        ask(tmp_path)


def started(run_dir: Path, *nodes: NodeProcesses) -> None:
    RunKey.new().save(run_dir / "key.json")
    for i, processes in enumerate(nodes):
        reporter = Reporter(run_dir, node=f"n-{i}")
        reporter.list_processes(processes)
        reporter.close()


def test_a_job_without_sidecars_is_starting(tmp_path: Path) -> None:
    started(tmp_path)
    with pytest.raises(NotFoundError, match="the job is starting"):
        ask(tmp_path)


def test_a_job_that_is_over_says_how_it_ended(tmp_path: Path) -> None:
    started(tmp_path, NodeProcesses(agent=1, sidecar=0))
    writer = EventWriter(events_file(tmp_path, "launcher"), node="launcher")
    writer.write(JobEnded(ok=False, message="it crashed"), source="launcher")
    writer.close()
    with pytest.raises(NotFoundError, match=r"the job is over \(it crashed\)"):
        ask(tmp_path)


def test_a_job_of_which_no_sidecar_answers_names_each(tmp_path: Path) -> None:
    gone = NodeProcesses(agent=1, sidecar=2, address="tcp://127.0.0.1:9")
    started(tmp_path, gone, NodeProcesses(agent=1, sidecar=0))
    with pytest.raises(PeerError, match="no sidecar answers") as caught:
        ask(tmp_path)
    assert "n-0: tcp://127.0.0.1:9" in str(caught.value)
    assert "n-1: its sidecar is down" in str(caught.value)


def test_nodes_are_found_by_the_names_they_have(tmp_path: Path) -> None:
    started(tmp_path, NodeProcesses(agent=1, sidecar=2), NodeProcesses(agent=3, sidecar=4))
    found = read_all_processes(tmp_path)
    assert {node: each.agent for node, each in found.items()} == {"n-0": 1, "n-1": 3}
