"""`holdfast bench`: every section runs and says what it is measured by; nothing is left behind.

No test here knows how fast anything is.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from ckpt.arena import ARENA_ROOT
from tools import bench
from tools.benching.samples import Row, Samples, Setup, Yardstick, in_turn
from tools.cli import EXIT_FAILED, EXIT_USAGE, main

PEERLESS = {
    "copy, checksum, seal",
    "first copy, new memory",
    "3 nodes: seal to protected",
    "rebuild of a lost block",
}
COMMAND = (sys.executable, "-m", "tools.cli", "bench")
ONCE = {"first copy, new memory", "rebuild of a lost block"}


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All sections, tiny, in a process of their own."""
    place = tmp_path_factory.mktemp("bench")
    before = left_in_memory()
    done = subprocess.run(
        [*COMMAND, "--megabytes", "1", "--repeat", "2", "--dir", str(place), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(place.iterdir()) == []
    assert left_in_memory() <= before
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def left_in_memory() -> set[str]:
    return {path.name for path in ARENA_ROOT.glob("holdfast-bench-*")}


def test_every_section_is_measured(found: dict[str, Any]) -> None:
    assert list(dict.fromkeys(row["section"] for row in found["rows"])) == list(bench.SECTIONS)
    assert (found["megabytes"], found["repeat"]) == (1, 2)
    assert found["machine"]["cores"] >= 1


def test_every_row_has_its_samples_and_a_reference(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        samples = row["samples_s"]
        assert len(samples) == (1 if row["name"] in ONCE else 2), row
        assert all(each > 0 for each in samples), row
        assert min(samples) <= row["seconds"] <= max(samples), row
        assert row["reference"]["seconds"] > 0, row
        assert math.isclose(row["of_reference"], row["seconds"] / row["reference"]["seconds"])
        assert math.isclose(row["gigabytes_per_s"], row["bytes"] / row["seconds"] / 1e9)


def test_the_rows_that_have_a_peer_are_compared_with_it(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        assert (row["peer"] is None) == (row["name"] in PEERLESS), row
        if row["peer"] is not None:
            assert math.isclose(row["of_peer"], row["seconds"] / row["peer"]["seconds"])


def test_the_state_has_about_the_size_asked_for(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        whole = row["bytes"] * (3 if row["name"] == "rebuild of a lost block" else 1)
        assert 0.9 < whole / (1 << 20) < 1.1, row


def test_only_the_sections_asked_for_run_and_parity_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from tools.cli import main\n"
        "assert main(['bench', '--megabytes', '1', '--repeat', '1', '--only', 'parity']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(bench.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert "encode 2 + 1" in done.stdout
    assert "CRC32C" in done.stdout
    assert "ckpt.save" not in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("full", "section", "told"),
    [("disk", "save", "--dir"), ("/dev/shm", "snapshot", "shared memory")],
)
def test_a_place_without_room_is_refused_before_anything_is_written(
    full: str,
    section: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = shutil.disk_usage

    def usage(path: Path) -> object:
        is_full = (full == "disk") == (Path(path) == tmp_path)
        return Usage(1, 1, 0) if is_full else real(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    words = ["bench", "--megabytes", "1", "--only", section, "--dir", str(tmp_path)]
    assert main(words) == EXIT_FAILED
    error = capsys.readouterr().err
    assert told in error
    assert "0 MiB" in error
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_free_memory", lambda: 0)
    assert main(["bench", "--only", "parity", "--dir", str(tmp_path)]) == EXIT_FAILED
    assert "of memory are needed" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--repeat", "0"], ["--megabytes", "x"], ["--only", "nosuch"]])
def test_a_wrong_command_line_ends_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words])
    assert end.value.code == EXIT_USAGE


def test_cases_run_in_turn_and_the_warm_up_does_not_count(tmp_path: Path) -> None:
    order: list[str] = []

    def case(name: str) -> Mapping[str, float]:
        order.append(name)
        return {name: float(len(order))}

    setup = Setup(size_bytes=1, repeat=2, directory=tmp_path, lap=lambda: order.append("|"))
    samples = in_turn([lambda: case("a"), lambda: case("b")], setup)
    assert "".join(order) == "ab|ab|ab|"
    row = samples.row("s", "a", 1, reference="b", peer="nobody")
    assert row.samples_s == (4.0, 7.0)
    assert row.peer is None
    assert row.of_peer is None


def test_nothing_timed_is_an_error() -> None:
    with pytest.raises(KeyError):
        Samples().row("s", "a", 1, reference="b")
    with pytest.raises(ValueError, match="never timed"):
        Row(
            section="s",
            name="a",
            size_bytes=1,
            samples_s=(),
            reference=Yardstick(name="b", seconds=1.0),
        )


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_says_what_was_compared_with_what(width: int) -> None:
    row = Row(
        section="save",
        name="ckpt.save",
        size_bytes=10**9,
        samples_s=(1.0, 2.0, 3.0),
        reference=Yardstick(name="file write + fsync", seconds=1.0),
        peer=Yardstick(name="DCP save", seconds=0.8),
    )
    console = Console(file=io.StringIO(), width=width)
    bench.show([row], console=console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for told in ("save", "ckpt.save", "2.00 s", "0.50", "DCP", "1.00 s", "800.0 ms", "2.50"):
        assert told in text
