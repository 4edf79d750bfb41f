"""Scripts that tests run in forks of a server end as scripts do that Python starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_scripts import ran

SCRIPT = """
import json, os, random, sys
import torch
import beside
found = {
    "name": __name__, "file": __file__, "argv": sys.argv, "folder": os.getcwd(),
    "first": sys.path[0], "environment": dict(os.environ), "input": sys.stdin.read(),
    "threads": torch.get_num_threads(), "dtype": str(torch.get_default_dtype()),
    "torch": torch.rand(2).tolist(), "modules": [n for n in sys.modules if n.startswith("script_")],
}
print(json.dumps({**found, "random": random.random()}))
torch.set_default_dtype(torch.float64)
print("to be read", file=sys.stderr)
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a script with a module beside it."""
    (tmp_path / "beside.py").touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def test_it_finds_what_it_finds_when_it_is_started(script: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINE": "yes"}
    command = [sys.executable, str(script)]
    (tmp_path / "elsewhere").mkdir()
    forked = ran(command, cwd=tmp_path / "elsewhere", env=environment, check=True)
    started = subprocess.run(
        command,
        cwd=tmp_path / "elsewhere",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    mine, theirs = (json.loads(each.stdout) for each in (forked, started))
    assert all(mine.pop(name) != theirs.pop(name) for name in ("random", "torch"))
    assert mine == theirs
    assert (mine["environment"]["MINE"], mine["threads"]) == ("yes", 1)
    assert forked.stderr == started.stderr == "to be read\n"


def test_one_leaves_nothing_to_the_next_and_its_status_is_told(script: Path) -> None:
    found: list[dict[str, Any]] = []
    for status in (0, 7):
        done = ran([sys.executable, script, status])
        assert done.returncode == status
        found.append(json.loads(done.stdout))
    assert all(found[0].pop(name) != found[1].pop(name) for name in ("random", "torch"))
    assert [each.pop("argv")[1:] for each in found] == [["0"], ["7"]]
    assert found[0] == found[1]
    with pytest.raises(subprocess.CalledProcessError):
        ran([sys.executable, script, 1], check=True)


def test_errors_kills_and_times_that_are_up_are_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nif sys.argv[1:]: os.kill(os.getpid(), 9)\n1 / 0\n")
    done = ran([sys.executable, script])
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert ran([sys.executable, script, "die"]).returncode == -9
    script.write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(subprocess.TimeoutExpired):
        ran([sys.executable, script], timeout=0.2)
