"""A running etcd, found by its process: its address, queries to it, its restart.

Queries use its JSON gateway, which every etcd since 3.4 has and which needs no client library.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from holdfast.ckpt.descriptors import readable
from holdfast.tools.chaos.faults.injector import MissedError
from holdfast.tools.chaos.scenarios.scenario import ScenarioError

_ASK_S: Final = 2.0
_END_S: Final = 10.0
_EVERYTHING: Final = base64.b64encode(b"\0").decode()
_DEFAULT: Final = "http://127.0.0.1:2379"


class EtcdProcess:
    """One member of an etcd."""

    def __init__(self, pid: int) -> None:
        """Inspect a process. Raises ``MissedError`` if it is gone."""
        self.pid = pid
        proc = Path("/proc", str(pid))
        try:
            self._program = (proc / "exe").readlink()
            self._argv = [os.fsdecode(word) for word in _words(proc / "cmdline")]
            pairs = (os.fsdecode(word).partition("=") for word in _words(proc / "environ"))
            self._env = {name: value for name, _, value in pairs}
            self._cwd = (proc / "cwd").readlink()
            self._output = (proc / "fd" / "2").readlink()
        except (FileNotFoundError, ProcessLookupError) as error:
            raise MissedError(f"coordinator {pid}: the process is gone") from error
        if not self._argv:  # between its start and its first instruction, or at its end
            raise MissedError(f"coordinator {pid}: it does not run now")

    @property
    def url(self) -> str:
        """Client address of the member. Raises ``ScenarioError`` if it needs TLS."""
        addresses = self._option("listen-client-urls") or self._option("advertise-client-urls")
        url = (addresses or _DEFAULT).split(",")[0].replace("0.0.0.0", "127.0.0.1")
        if not url.startswith("http://"):
            raise ScenarioError(
                f"etcd at {url} requires TLS, and this tool queries leader, leases and revisions "
                "over plain HTTP; give an etcd without certificates, or use the kinds kill and "
                "stop"
            )
        return url

    def ask(self, path: str, **body: object) -> dict[str, Any]:
        """Return the member's answer. Raises ``MissedError`` if there is none, or for a refusal."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        try:
            with opener.open(request, timeout=_ASK_S) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace")
            raise MissedError(f"etcd {self.url}{path}: {error.code} {said}") from error
        except OSError as error:
            raise MissedError(f"etcd {self.url}{path}: {error}") from error

    def leads(self) -> bool:
        """True if the member is the leader; False if it does not answer."""
        with contextlib.suppress(MissedError):
            status = self.ask("/v3/maintenance/status")
            return bool(status.get("leader", "0") == status["header"]["member_id"])
        return False

    def entries(self) -> tuple[dict[bytes, int], int]:
        """Return the lease of every key (0: none), and the revision."""
        found = self.ask("/v3/kv/range", key=_EVERYTHING, range_end=_EVERYTHING, keys_only=True)
        leases = {
            base64.b64decode(each["key"]): int(each.get("lease", 0))
            for each in found.get("kvs", ())
        }
        return leases, int(found["header"]["revision"])

    def kill(self) -> None:
        """Send SIGKILL. Raises ``MissedError`` if the process is gone."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError as error:
            raise MissedError(f"coordinator {self.pid}: the process is gone") from error
        with os.fdopen(pidfd):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            _await_end(pidfd)

    def start_again(self) -> subprocess.Popen[bytes]:
        """Start the killed member again with the same arguments, environment and files."""
        regular = self._output.is_file()
        with (self._output if regular else Path(os.devnull)).open("ab") as output:
            return subprocess.Popen(
                self._argv,
                executable=self._program,
                env=self._env,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _option(self, name: str) -> str:
        for word, following in zip(self._argv, [*self._argv[1:], ""], strict=True):
            flag, equals, value = word.lstrip("-").partition("=")
            if word.startswith("-") and flag == name:
                return value if equals else following
        return self._env.get(f"ETCD_{name.replace('-', '_').upper()}", "")


def _words(path: Path) -> Iterator[bytes]:
    return (word for word in path.read_bytes().split(b"\0") if word)


def _await_end(pidfd: int) -> None:
    """Wait until a killed process has released its files and ports."""
    if not readable([pidfd], _END_S):
        raise MissedError("a coordinator that was killed does not end")
