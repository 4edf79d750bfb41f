"""A node's part of a job on Ray: its key, its notice, and its end with the actor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from session_imports import IMPORTING_ONCE
from tree import HELPERS
from undisturbed import WAITING, alone, weights

from holdfast.ckpt.transport import RunKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

DEADLINE_S = 200.0
PARTS = HELPERS / "ray_parts.py"
STAYS = """
import json, os, time
from pathlib import Path
with Path(os.environ["HOLDFAST_TEST_LOG"]).open("a") as log:
    log.write(json.dumps({"waits": 0, "world": 2}) + "\\n")
time.sleep(600)
"""
"""A script without torch that ends only with those who started it."""


class Parts:
    """The process that has the parts, and the lines that their workers told."""

    def __init__(self, folder: Path, script: Path, env: Mapping[str, str], *, nodes: int) -> None:
        self.folder, self.log, self.end = folder, folder / "log.jsonl", folder / "end"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.env = {
            **os.environ,
            **env,
            "HOLDFAST_TEST_LOG": str(self.log),
            "HOLDFAST_TEST_END": str(self.end),
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
        }
        with (folder / "said").open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, str(PARTS), str(folder), str(script), str(nodes)],
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=said,
            )

    def lines(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        return [msgspec.json.decode(line) for line in self.log.read_bytes().splitlines()]

    def await_world(self, world: int) -> None:
        def wait() -> bool:
            return sum("waits" in line and line["world"] == world for line in self.lines()) >= world

        self.wait_for(wait)

    def wait_for(self, there: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not there():
            said = (self.folder / "said").read_text()
            assert time.monotonic() < deadline_s, f"{self.lines()}\n{said}"
            time.sleep(0.05)

    def ends(self) -> list[dict[str, Any]]:
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, (self.folder / "said").read_text()
        return sorted(map(json.loads, output.splitlines()), key=lambda end: int(end["node"]))

    def commands(self) -> dict[int, str]:
        """Return the command of every process of the job by its id."""
        found = {}
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdecimal() and self._mark in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_text()
        return {pid: command for pid, command in found.items() if command}

    @property
    def _mark(self) -> bytes:
        return f"HOLDFAST_TEST_LOG={self.log}".encode()


@contextmanager
def started(folder: Path, script: Path, env: Mapping[str, str]) -> Iterator[Parts]:
    found = Parts(folder, script, env, nodes=2)
    try:
        yield found
    finally:
        with contextlib.suppress(ProcessLookupError):
            found.process.kill()
        found.process.wait()


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    with started(tmp_path, WAITING, IMPORTING_ONCE) as found:
        yield found


@pytest.fixture
def parts_that_stay(tmp_path: Path) -> Iterator[Parts]:
    script = tmp_path / "stays.py"
    script.write_text(STAYS)
    with started(tmp_path, script, {}) as found:
        yield found


def test_a_node_whose_end_is_foretold_leaves_and_the_key_is_in_no_command(parts: Parts) -> None:
    parts.await_world(2)
    keys = list(parts.temporary.glob("holdfast-*/key.json"))
    assert len(keys) >= 3, "one for the coordinator, one for each node"
    for path in keys:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (key,) = {RunKey.load(path) for path in keys}
    commands = parts.commands()
    assert any("holdfast.tools.cli\0run" in command for command in commands.values())
    for secret in (key.client_secret, key.server_secret):
        assert not any(secret in command for command in commands.values())
    (parts.folder / "drain-1").touch()
    parts.await_world(1)
    parts.end.touch()
    stayed, left = parts.ends()
    assert (stayed["status"], stayed["left"]) == (0, False)
    assert left["left"]
    assert "left after a notice" in left["message"]
    assert [weights(line) for line in parts.lines() if "done" in line] == [alone()]
    assert list(parts.temporary.glob("holdfast-*")) == []


def test_all_of_a_job_ends_with_the_process_that_has_its_parts(parts_that_stay: Parts) -> None:
    parts = parts_that_stay
    parts.await_world(2)
    assert len(parts.commands()) > 6, "two launchers, agents, sidecars and workers at least"
    parts.process.send_signal(signal.SIGKILL)
    parts.process.wait()
    parts.wait_for(lambda: not parts.commands())
