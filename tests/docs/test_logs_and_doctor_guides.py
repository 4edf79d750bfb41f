"""The commands of the guides to logs and to the doctor do what the guides say."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from document_blocks import blocks
from session_imports import IMPORTING_ONCE

DOCS = Path(__file__).parents[2] / "docs" / "how-to"


def commands(guide: str) -> list[str]:
    lines = [line for body in blocks(DOCS / guide, "console") for line in body.splitlines()]
    return [line.removeprefix("$ ") for line in lines]


def called(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.tools.cli", *shlex.split(command)[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, **IMPORTING_ONCE},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the job of the guide to logs has run."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "train.py").write_text(blocks(DOCS / "logs.md", "python")[0])
    done = called(commands("logs.md")[0], folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("command", commands("logs.md")[1:])
def test_a_command_of_the_guide_to_logs(command: str, folder: Path) -> None:
    done = called(command, folder)
    assert done.returncode == 0, done.stderr
    if command == "holdfast logs runs/live":
        assert "trainer/0: | step 10" in done.stdout
    if "--json" in command:
        kinds = {json.loads(line)["kind"] for line in done.stdout.splitlines()}
        assert {"job_started", "proposed", "output", "job_ended"} <= kinds
    if "--kind step" in command:
        assert "step 20" in done.stdout


@pytest.mark.parametrize("command", commands("doctor.md"))
def test_a_command_of_the_guide_to_the_doctor(command: str, folder: Path) -> None:
    done = called(command, folder)
    assert done.returncode in (0, 1), done.stderr
    assert "remedy: " in done.stdout or " 0 failure" in done.stdout or "removed: " in done.stdout
    assert "Traceback" not in done.stderr
    if "--bundle" in command:
        assert (folder / "report.tar.gz").stat().st_size > 1000
