"""`holdfast run --metrics --otlp` with a real kill: what a scraper reads, what a collector gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from collectors import collecting
from event_lines import EventLines
from ports import free_ports
from prometheus_client.parser import text_string_to_metric_families
from promtool import checked
from session_imports import IMPORTING_ONCE

from holdfast.elastic.agent.reporting import read_processes

SCRIPT: Final = Path(__file__).parents[1] / "helpers" / "tiny_training.py"
DEADLINE_S: Final = 280.0


def scrape(port: int) -> str:
    """Return the metrics, empty while nobody serves them."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.URLError:
        return ""


def values(text: str) -> dict[tuple[str, ...], float]:
    """Return values by name and the values of the labels."""
    return {
        (sample.name.removeprefix("holdfast_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def await_that(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_a_job_that_is_hurt_is_seen_by_prometheus_and_by_a_collector(tmp_path: Path) -> None:
    run_dir, gate = tmp_path / "run", tmp_path / "gate"
    (port,) = free_ports(1)
    history: list[dict[str, Any]] = []
    reader = EventLines(run_dir)

    def has(kind: str, **fields: object) -> bool:
        history.extend(reader.new())
        return any(e["kind"] == kind and fields.items() <= e.items() for e in history)

    with collecting() as collector:
        words = ["run", "--nodes", "2", "--run-dir", run_dir, "--metrics", port]
        words += ["--otlp", collector.url, SCRIPT, "--steps", 12, "--gate", 6, gate]
        words += ["--checkpoint", tmp_path / "store", "--checkpoint-every", 4]
        words += ["--result", tmp_path / "result"]
        job = subprocess.Popen(
            [sys.executable, "-m", "holdfast.tools.cli", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **IMPORTING_ONCE, "NO_PROXY": "127.0.0.1"},
        )
        with job:
            try:
                await_that(lambda: has("step", step=6), job)
                found = read_processes(run_dir, "node1")
                assert found is not None
                victim = found.workers["trainer/1"]
                os.kill(victim, signal.SIGKILL)
                await_that(lambda: has("restored", generation=2), job)
                await_that(
                    lambda: values(scrape(port)).get(("detections_total", "node1", "exit")) == 1,
                    job,
                )
                text = scrape(port)
                gate.touch()
                said, _ = job.communicate(timeout=DEADLINE_S)
            finally:
                job.kill()
    assert job.returncode == 0, said
    assert "Traceback" not in said
    assert scrape(port) == "", "the server ends with the job"

    metrics = values(text)
    assert metrics["job_running",] == 1
    assert metrics["step",] >= 6
    assert metrics["up", "node0"] == 1
    assert metrics["workers_exited_total", "node1", "trainer"] == 1
    assert checked("check", "metrics", given=text) == ""

    spans = {span.name: span for span in collector.spans()}
    recovery = spans["recovery"]
    parts = [s for s in collector.spans() if s.trace_id == recovery.trace_id]
    assert {"agree", "fence", "reform", "restore", "first step"} <= {s.name for s in parts}
    assert all(s.parent_span_id == recovery.span_id for s in parts if s is not recovery)
    assert {"checkpoint", "write", "start of training"} <= spans.keys()
    sent = {s.SerializeToString() for s in collector.spans()}  # a slow answer has it sent again
    assert len({(s.trace_id, s.span_id) for s in collector.spans()}) == len(sent)
    origins = {
        (a["holdfast.node"].string_value, a["holdfast.role"].string_value)
        for resource, found_spans in collector.resources()
        for a in [{each.key: each.value for each in resource.attributes}]
        if any(s.trace_id == recovery.trace_id for s in found_spans)
    }
    assert {("node0", "trainer"), ("node0", "agent"), ("node1", "agent")} <= origins
