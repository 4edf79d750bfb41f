"""`holdfast check` as a user runs it: quiet on right loops, and it names planted misuses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster import Cluster, cluster
from forked_check import PRELOAD, checked
from planted import MISUSES, RIGHT, Loop

DEADLINE_S = 280.0
QUICKLY = ("clock_in_the_loss",)
"""The misuse that the command itself looks for in every test run."""

STARTED = ("vocabulary_of_a_set", "environment")
"""Those that show only in processes that are started, with an environment of their own."""

OFTEN = (
    "hidden_state", "leader_breaks", "lr_by_rank", "never_stepped", "own_generator",
    "own_loader_in_order", "own_state_half_restored", "stepped_by_hand",
    "untracked_counter", "zero_grad_in_the_pass",
)  # fmt: skip
"""Those that are looked for in every test run in forked processes."""


def check(loop: Loop, folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit status, the report and what was said."""
    script, report = loop.write(folder), folder / "report.json"
    words = [sys.executable, "-m", "holdfast.tools.cli", "check", "--json", str(report), *options]
    done = subprocess.run(
        [*words, str(script)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    found = msgspec.json.decode(report.read_bytes()) if report.exists() else {}
    return done.returncode, found, done.stdout + done.stderr


def by_name(*names: str) -> list[Loop]:
    return [loop for loop in (*MISUSES, *RIGHT) if loop.name in names]


def assert_found(loop: Loop, folder: Path) -> None:
    status, report, said = check(loop, folder, "--only", loop.shows, "--ranks", "1,2")
    assert status == 1, said
    (finding,) = report["findings"]
    text = " | ".join([finding["text"], *finding["also"], finding["remedy"]])
    assert re.search(loop.said, text), text


@pytest.mark.parametrize("loop", by_name(*QUICKLY), ids=lambda loop: loop.name)
def test_a_planted_misuse_is_named(loop: Loop, tmp_path: Path) -> None:
    assert_found(loop, tmp_path)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    with cluster(PRELOAD) as found:
        yield found


def forked() -> list[object]:
    rest = pytest.mark.exhaustive
    return [
        pytest.param(loop, id=loop.name, marks=() if loop.name in OFTEN else rest)
        for loop in MISUSES
        if loop.name not in STARTED
    ]


@pytest.mark.parametrize("loop", forked())
def test_every_planted_misuse_is_named_in_forked_processes(
    loop: Loop, ranks: Cluster, tmp_path: Path
) -> None:
    options = ("--only", loop.shows, "--ranks", "1,2")
    report = checked(ranks, tmp_path, *options, script=str(loop.write(tmp_path)))
    (finding,) = report.findings
    text = " | ".join([finding.text, *finding.also, finding.remedy])
    assert re.search(loop.said, text), text


@pytest.mark.exhaustive
@pytest.mark.parametrize("loop", MISUSES, ids=lambda loop: loop.name)
def test_every_planted_misuse_is_named(loop: Loop, tmp_path: Path) -> None:
    assert_found(loop, tmp_path)


def test_at_least_thirty_misuses_are_planted() -> None:
    assert len({loop.name for loop in MISUSES}) == len(MISUSES) >= 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "runs",
    [
        ("kills", "disk"),
        pytest.param(
            ("again", "ranks", "ranks", "shares", "kills", "disk"), marks=pytest.mark.exhaustive
        ),
    ],
    ids=len,
)
def test_a_right_loop_is_quiet(tmp_path: Path, runs: tuple[str, ...]) -> None:
    """The loops of the library have all runs, in forked processes."""
    (loop,) = by_name("all_the_usual")
    only = [word for name in dict.fromkeys(runs) for word in ("--only", name)]
    status, report, said = check(loop, tmp_path, *only)
    assert (status, report["findings"]) == (0, []), said
    assert tuple(run["property"] for run in report["checked"]) == runs
    assert report["notes"] == []
    assert f"All {len(runs)} runs gave the same, bit for bit." in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("loop", RIGHT, ids=lambda loop: loop.name)
def test_every_right_loop_is_quiet(loop: Loop, tmp_path: Path) -> None:
    status, report, said = check(loop, tmp_path)
    assert (status, report["findings"]) == (0, []), said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ValueError('no data here')", "fails by itself.*ValueError: no data here"),
        ("print('done')", "ended without training|made no step"),
    ],
    ids=["crashes", "never trains"],
)
def test_a_script_that_cannot_be_checked_is_told_apart(
    source: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(source)
    words = [sys.executable, "-m", "holdfast.tools.cli", "check", str(tmp_path / "train.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2, done.stdout
    assert re.search(said, done.stdout + done.stderr, re.DOTALL)


def test_a_run_that_needs_more_time_is_no_finding(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(600)")
    words = [sys.executable, "-m", "holdfast.tools.cli", "check", "--limit-s", "1", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 3, done.stdout
    assert "alone: not finished within 1 s" in done.stdout
    assert "--limit-s 2" in done.stdout
