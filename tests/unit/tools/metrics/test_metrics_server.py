"""The server of `/metrics` and its reader: what a scraper gets, and what it never waits for."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from node_answers import ANSWERING
from prometheus_client.parser import text_string_to_metric_families
from synthetic_run import BEGIN, hurt_job

from holdfast.ckpt.errors import NotFoundError, PeerError
from holdfast.elastic.events import Event, JobEnded, JobStarted, StepDone
from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.tools import cli
from holdfast.tools.beside.places import LOOPBACK, ServedPlace
from holdfast.tools.metrics.reading import MetricsReader
from holdfast.tools.metrics.server import serving
from holdfast.tools.show.node_status import NodeStatus


def write(run_dir: Path, *events: Event) -> None:
    writer = EventWriter(events_file(run_dir, "n0"), node="n0")
    for event in events:
        writer.write(event, source="worker")
    writer.close()


def reader(run_dir: Path, nodes: Callable[[Path], list[NodeStatus]]) -> MetricsReader:
    made = MetricsReader(run_dir, nodes=nodes, now=lambda: BEGIN + 60)
    made.begin()
    return made


def values(text: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(place: ServedPlace) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{place}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text: str = answer.read().decode()
    return text


def test_a_scrape_has_events_answers_and_the_course_of_the_run(tmp_path: Path) -> None:
    write(tmp_path, *[event for event in hurt_job() if not isinstance(event, JobEnded)])
    made = reader(tmp_path, lambda run_dir: [ANSWERING])
    with serving(ServedPlace(LOOPBACK, 0), made.samples) as place:
        found = values(scrape(place))
    assert found["holdfast_step"] == 18
    assert found["holdfast_protected_step"] == 40
    assert 0 < found["holdfast_goodput_ratio"] < 1
    assert found["holdfast_read_timestamp_seconds"] == BEGIN + 60
    assert "python_info" not in found


def test_what_is_written_later_comes_with_the_next_reading(tmp_path: Path) -> None:
    write(tmp_path, JobStarted(run="r", time_s=BEGIN), StepDone(step=1, time_s=BEGIN + 1))
    made = reader(tmp_path, lambda run_dir: [ANSWERING])
    write(tmp_path, StepDone(step=2, time_s=BEGIN + 2))
    found = {sample.name: sample.value for sample in made.samples()}
    assert found["holdfast_step"] == 1
    made.refresh()
    found = {sample.name: sample.value for sample in made.samples()}
    assert found["holdfast_step"] == 2


def test_nodes_that_do_not_answer_cost_their_samples_only(tmp_path: Path) -> None:
    def silent(run_dir: Path) -> list[NodeStatus]:
        raise PeerError("no sidecar answers")

    write(tmp_path, JobStarted(run="r", time_s=BEGIN), StepDone(step=1, time_s=BEGIN + 1))
    names = {sample.name for sample in reader(tmp_path, silent).samples()}
    assert "holdfast_step" in names
    assert "holdfast_up" not in names


def test_a_scrape_does_not_wait_for_a_node(tmp_path: Path) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def slow(run_dir: Path) -> list[NodeStatus]:
        asked.set()
        assert goes_on.wait(60)
        return [ANSWERING]

    write(tmp_path, JobStarted(run="r", time_s=BEGIN), StepDone(step=1, time_s=BEGIN + 1))
    made = MetricsReader(tmp_path, nodes=slow)
    thread = threading.Thread(target=made.begin)
    with serving(ServedPlace(LOOPBACK, 0), made.samples) as place:
        thread.start()
        assert asked.wait(60)
        assert scrape(place) == ""
        goes_on.set()
        thread.join()
        assert "holdfast_step 1.0" in scrape(place)


def test_a_damaged_line_is_counted_and_the_others_are_read(tmp_path: Path) -> None:
    write(tmp_path, JobStarted(run="r", time_s=BEGIN))
    with events_file(tmp_path, "n0").open("ab") as file:
        file.write(b'{"kind": 7}\n')
    write(tmp_path, StepDone(step=1, time_s=BEGIN + 1))
    found = {s.name: s.value for s in reader(tmp_path, lambda run_dir: []).samples()}
    assert found["holdfast_read_errors_total"] == 1
    assert found["holdfast_step"] == 1


def test_a_port_that_is_taken_is_named() -> None:
    with (
        serving(ServedPlace(LOOPBACK, 0), list) as place,
        pytest.raises(OSError, match=f"{place}"),
        serving(place, list),
    ):
        pass


def test_a_run_is_printed_once_where_no_port_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, *hurt_job())
    assert cli.main(["metrics", str(tmp_path)]) == 0
    assert values(capsys.readouterr().out)["holdfast_step"] == 18


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere: no such directory"):
        MetricsReader(tmp_path / "nowhere")
