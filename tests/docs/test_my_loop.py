"""The guide's test of a custom loop passes, as pytest runs it for a reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from session_imports import PRELOAD

from holdfast.elastic.preload.program import PRELOAD_ENV

ROOT = Path(__file__).parents[2]
PLUGIN = "holdfast.tools.chaos.plugin"


@pytest.mark.timeout(400)
def test_the_test_of_a_loop_of_ones_own_passes(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # the limits of our own suite are for tests
    registered = any(each.value == PLUGIN for each in entry_points(group="pytest11"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--strict-markers", "-p", "no:cacheprovider"),
            *(() if registered else ("-p", PLUGIN)),
            *("-c", str(tmp_path / "pytest.ini"), f"--rootdir={tmp_path}"),
            f"--basetemp={tmp_path / 'made'}",
            str(ROOT / "docs" / "examples" / "test_my_loop.py"),
        ],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if "PYTEST" not in name},
            PRELOAD_ENV: ",".join(PRELOAD),
        },
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (tmp_path / "made").rglob("result.json")
    report = json.loads(result.read_text())
    assert report["held"]
    assert [each["kind"] for each in report["struck"]] == ["kill", "lose"]
    assert {"state of the reference", "samples of the reference"} <= set(
        report["verdict"]["checked"]
    )
