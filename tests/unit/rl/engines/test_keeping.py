"""A kept server is announced while it answers, and withdrawn before it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.adapters.rl.engines.announced import AnnouncedServers, Announcement
from holdfast.adapters.rl.engines.server_process import ServerProcess
from holdfast.elastic.channel.base import WORKER_ENV
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.rl import keep_server

PATIENCE_S = 60.0

SERVER = """
import os, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if os.path.exists(sys.argv[2]):
            threading.Event().wait()
        self.send_response(200)
        self.end_headers()
    def log_message(self, *given): pass
print(os.getpid(), file=open(sys.argv[3], "w"), flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def until(holds: Callable[[], Any], what: str) -> Any:
    """Wait until something holds, and return it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline_s, f"never: {what}"
        threading.Event().wait(0.02)
    return found


def gone(pid: int) -> bool:
    """Say whether a process has ended."""
    try:
        return b") Z" in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True


class Kept:
    """A keeper in this process, and what happens meanwhile on a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hang, self.pid = folder, folder / "hang", folder / "pid"
        self.seen: list[str] = []

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", SERVER, "{port}", str(self.hang), str(self.pid)]

    def files(self) -> list[Path]:
        """Return the announcements."""
        found = self.folder.glob("servers/*")
        return [each for each in found if not each.name.startswith(".")]

    def keep(self, then: Callable[[], object], **given: Any) -> None:
        """Keep the server; once it is announced, do something."""

        def act() -> None:
            (file,) = until(self.files, "an announcement")
            self.seen.append(file.read_text())
            then()

        thread = threading.Thread(target=act)
        thread.start()
        try:
            keep_server(self.folder, self.command, ready="/", role="", **given)
        finally:
            thread.join()
            assert self.files() == []
            pid = int(self.pid.read_text())
            until(lambda: gone(pid), "the end of the server")


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_sigterm_withdraws_the_server_and_ends_it(kept: Kept) -> None:
    kept.keep(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert kept.seen[0].startswith("http://127.0.0.1:")


def test_a_server_that_ends_is_reported(kept: Kept) -> None:
    with pytest.raises(JobFailedError, match="the server ended with killed by SIGKILL"):
        kept.keep(lambda: os.kill(int(kept.pid.read_text()), signal.SIGKILL))


def test_a_server_that_hangs_is_reported_and_killed(kept: Kept) -> None:
    with pytest.raises(JobFailedError, match=r"hangs: GET / has not succeeded for"):
        kept.keep(kept.hang.touch, silence_s=0.5)


def test_a_server_that_never_answers_is_reported(kept: Kept) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)", "{port}"]
    with pytest.raises(JobFailedError, match=r"no success of GET /health within 0.3 s"):
        keep_server(kept.folder, command, role="", start_s=0.3)


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"let it have \{port\}"):
        keep_server(tmp_path, ["serve"], role="")
    with pytest.raises(ConfigError, match="there is no program 'no-such-server'"):
        keep_server(tmp_path, ["no-such-server", "{port}"], role="")
    with pytest.raises(ConfigError, match="silence_s"):
        keep_server(tmp_path, ["serve", "{port}"], role="", silence_s=0)


def test_a_process_of_another_role_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WORKER_ENV, raising=False)
    assert not keep_server(tmp_path, ["no-such-server", "{port}"])


def test_a_server_ends_with_all_it_started_when_its_keeper_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from holdfast.adapters.rl.engines.server_process import ServerProcess\n"
        "server = ServerProcess(['sh', '-c', 'sleep 600 & echo $! $$; wait'])\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        pids = [int(each) for each in keeper.stdout.readline().split()]
        keeper.kill()
    for pid in pids:
        until(lambda pid=pid: gone(pid), f"the end of {pid}")


def test_what_a_server_leaves_when_it_ends_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    server = ServerProcess(["sh", "-c", f"sleep 600 & echo $! > {pid}; exit 3"])
    assert until(server.ended, "the end of the server") == 3
    until(lambda: gone(int(pid.read_text())), "the end of what it left")
    server.stop(grace_s=1.0)


def test_announced_servers_come_and_go(tmp_path: Path) -> None:
    made: list[str] = []

    def make(url: str) -> Any:
        made.append(url)
        return object()

    servers = AnnouncedServers(tmp_path / "meet", make)
    assert servers.engines() == []
    code = (
        "import sys; from holdfast.adapters.rl.engines.announced import Announcement\n"
        "found = Announcement(sys.argv[1], 'http://there:1')\n"
        "print(flush=True)\n"
        "sys.stdin.readline()\n"
        "found.withdraw()\n"
        "print(flush=True)\n"
        "sys.stdin.readline()"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "meet")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as there:
        assert there.stdin is not None
        assert there.stdout is not None
        there.stdout.readline()
        (one,) = servers.engines()
        assert servers.engines() == [one]
        there.stdin.write(b"\n")
        there.stdin.flush()
        there.stdout.readline()
        assert servers.engines() == []
        there.kill()
    assert made == ["http://there:1"]


def test_a_server_that_died_is_no_longer_announced(tmp_path: Path) -> None:
    (tmp_path / "servers").mkdir()
    left = tmp_path / "servers" / "left"
    left.write_text("http://there:1")
    assert AnnouncedServers(tmp_path, pytest.fail).engines() == []
    assert not left.exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give a directory that can be written"):
        Announcement(tmp_path / "file", "http://there:1")
