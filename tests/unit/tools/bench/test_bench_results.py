"""Results of the benchmark are on disk after each section, whole, and tell the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast.tools.bench.results import STDOUT, BenchResults
from holdfast.tools.bench.samples import Figure

FIGURE = Figure(section="plan", name="n", value=1.0, unit="s", low=1.0, high=1.0)


def results(target: str | None) -> BenchResults:
    return BenchResults(target, sections=["plan", "verify"], size_mib=7, repeat=2)


def test_the_file_is_replaced_after_each_section_and_names_those_left(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text("of an earlier run")
    found = results(str(path))
    assert path.read_text() == "of an earlier run"
    found.add("plan", [FIGURE], seconds=3.0)
    first = json.loads(path.read_text())
    assert [figure["name"] for figure in first["figures"]] == ["n"]
    assert first["sections"]["plan"]["seconds"] == 3.0
    assert (first["left"], first["megabytes"], first["repeat"]) == (["verify"], 7, 2)
    with path.open() as opened:  # a reader of the old file sees it whole
        found.add("verify", [], seconds=1.0)
        assert json.loads(opened.read()) == first
    assert json.loads(path.read_text())["left"] == []
    assert list(tmp_path.iterdir()) == [path]


def test_the_machine_is_told(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    results(str(path)).add("plan", [], seconds=0.0)
    found = json.loads(path.read_text())
    machine = found["machine"]
    assert machine["processor"] and machine["features"] == sorted(machine["features"])
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["memory_bytes"] > 1 << 28
    assert machine["kernel"] == os.uname().release
    assert {"python", "torch", "boto3"} <= found["versions"].keys()


def test_standard_output_gets_them_once_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = results(STDOUT)
    nothing.finish()
    assert capsys.readouterr().out == ""
    found = results(STDOUT)
    found.add("plan", [FIGURE], seconds=3.0)
    assert capsys.readouterr().out == ""
    found.finish()
    assert json.loads(capsys.readouterr().out)["left"] == ["verify"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        results(str(pipe)).add("plan", [], seconds=0.0)
        assert json.loads(os.read(reader, 1 << 20))["left"] == ["verify"]
    finally:
        os.close(reader)
    assert pipe.is_fifo()
