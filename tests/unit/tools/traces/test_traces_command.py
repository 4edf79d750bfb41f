"""`holdfast traces` on a run that is over: sent once, refused by name where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from collectors import collecting
from ports import free_ports
from synthetic_run import hurt_job

from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.tools import cli


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The directory of a run that is over."""
    writer = EventWriter(events_file(tmp_path, "n0"), node="n0")
    for event in hurt_job():
        writer.write(event, source=event.source or "agent")
    writer.close()
    return tmp_path


def test_the_traces_of_a_run_that_is_over_arrive(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with collecting() as collector:
        assert cli.main(["traces", str(run_dir), "--otlp", collector.url]) == 0
    names = [span.name for span in collector.spans()]
    assert names.count("recovery") == 2
    assert names.count("join") == 2
    assert collector.paths == {"/v1/traces"}
    assert f"{len(names)} spans sent to {collector.url}/v1/traces" in capsys.readouterr().err


def test_a_second_reader_sends_the_same_numbers(run_dir: Path) -> None:
    with collecting() as collector:
        for _ in range(2):
            assert cli.main(["traces", str(run_dir), "--otlp", collector.url, "--once"]) == 0
    found = [(span.trace_id, span.span_id) for span in collector.spans()]
    assert len(set(found)) == len(found) // 2


def test_a_collector_that_is_not_there_is_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    assert cli.main(["traces", str(run_dir), "--otlp", url, "--once"]) == 1
    assert f"error: {url}/v1/traces takes no spans; check the address" in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["traces", str(tmp_path / "nowhere"), "--otlp", "http://localhost:4318"]
    assert cli.main(words) == 1
    assert "nowhere: no such directory" in capsys.readouterr().err
