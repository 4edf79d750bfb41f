"""Real etcd for tests: clusters of one or more members on loopback, which tests may kill.

By hand: ``python tests/services/etcd.py DIR [MEMBERS]`` fetches etcd if it is missing, starts the
members, prints their address and runs until Ctrl-C; ``--install`` only fetches it. Nothing needs
root: Debian's package is unpacked, not installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from debian import unpack
from etcd_security import Certificates
from keeper import DidNotStart, Facts, end, hang, launch, tail, words_by_hand
from ports import free_ports

_READY_S: Final = 60.0
_POLL_S: Final = 0.02
_TRIES: Final = 3
_MEMORY: Final = Path("/dev/shm")
_ROOM_BYTES: Final = 4 << 30
_MARK: Final = "etcd-for-tests"
_DIVERGING: Final = {(3, 5, 0), (3, 5, 1), (3, 5, 2)}
"""Versions whose members can come to disagree after a kill (etcd-io/etcd#13766)."""


def program() -> Path:
    """Return the etcd to run: the system's, else one unpacked before or now.

    Raises ``CannotInstall``.
    """
    found = shutil.which("etcd")
    if found and version(Path(found)) not in _DIVERGING:
        return Path(found)
    kept = _cache() / "etcd"
    if not kept.exists():
        unpack("etcd-server", program="etcd", target=kept)
    return kept


def version(etcd: Path) -> tuple[int, ...]:
    """Return the version a program says it has."""
    said = subprocess.run([etcd, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "holdfast" / "etcd"


@dataclass(slots=True)
class Member:
    """One member: where it listens and, while it lives, its process."""

    name: str
    client_port: int
    peer_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Return ``host:port`` for clients."""
        return f"127.0.0.1:{self.client_port}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal: SIGSTOP has the member hang with its connections open."""
        assert self.process is not None, f"{self.name} does not run"
        if number == signal.SIGSTOP:
            hang(self.process)
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the member and wait for its end; its data stays."""
        if self.process is not None:
            end(self.process)
            self.process = None


@dataclass(slots=True)
class Cluster:
    """Members that know each other; ``folder`` has their logs.

    Their data is in memory where there is room: what a killed process had written stays either
    way, and tests should not wait for a busy disk. With ``certificates`` clients must show one;
    ``token_s`` is how long a token of authentication lives while it is not used.
    """

    folder: Path
    size: int = 1
    certificates: Certificates | None = None
    token_s: int = 300
    heartbeat_ms: int = 50
    election_ms: int = 500
    extra: Sequence[str] = ()
    members: list[Member] = field(init=False)
    _data: Path = field(init=False)
    _etcd: Path = field(init=False)
    _log: IO[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._etcd = program()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._data = _data_folder(self.folder)
        self._log = (self.folder / "members.out").open("ab")
        ports = free_ports(2 * self.size)
        self.members = [Member(f"m{i}", ports[2 * i], ports[2 * i + 1]) for i in range(self.size)]

    @property
    def scheme(self) -> str:
        """Return how clients speak to it."""
        return "https" if self.certificates else "http"

    @property
    def endpoints(self) -> str:
        """Return ``host:port,host:port`` for clients."""
        return ",".join(member.endpoint for member in self.members)

    @property
    def url(self) -> str:
        """Return the address for Holdfast, with the client's certificate where there are any."""
        if self.certificates is None:
            return f"etcd://{self.endpoints}"
        return f"etcds://{self.endpoints}?{self.certificates.query}"

    def start(self) -> None:
        """Start the members that do not run and wait until all of them answer."""
        for member in self.members:
            if member.process is None:
                member.process = launch(self._command(member), self._log, environment=_plain())
        for member in self.members:
            self.await_health(member)

    def stop(self) -> None:
        """Kill whatever runs."""
        for member in self.members:
            member.kill()

    def close(self) -> None:
        """Kill whatever runs and remove the data; again does nothing."""
        self.stop()
        self._log.close()
        shutil.rmtree(self._data, ignore_errors=True)

    def _command(self, member: Member) -> list[str]:
        peer = f"http://127.0.0.1:{member.peer_port}"
        client = f"{self.scheme}://{member.endpoint}"
        cluster = ",".join(f"{m.name}=http://127.0.0.1:{m.peer_port}" for m in self.members)
        options = {
            "name": member.name,
            "data-dir": str(self._data / member.name),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": cluster,
            "initial-cluster-token": self.folder.name,
            "heartbeat-interval": str(self.heartbeat_ms),
            "election-timeout": str(self.election_ms),
            "auth-token-ttl": str(self.token_s),
            "bcrypt-cost": "4",
            "logger": "zap",
            "log-outputs": "stderr",
            "log-level": "warn",
        }
        if self.certificates:
            options |= self.certificates.server_options
        flags = [f"--{name}={value}" for name, value in options.items()]
        return [str(self._etcd), *flags, *self.extra]

    def await_health(self, member: Member) -> None:
        """Wait until a member answers and has a leader."""
        context = self.certificates.context() if self.certificates else None
        deadline_s = time.monotonic() + _READY_S
        url = f"{self.scheme}://{member.endpoint}/health"
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        while True:
            with contextlib.suppress(OSError), opener.open(url, timeout=2.0) as answer:
                if b'"true"' in answer.read():
                    return
            process = member.process
            if process is None or process.poll() is not None or time.monotonic() > deadline_s:
                said = tail(self.folder / "members.out")
                raise DidNotStart(f"etcd member {member.name} is not healthy:\n{said}")
            time.sleep(_POLL_S)


def _data_folder(otherwise: Path) -> Path:
    """Return a new folder, in memory where there is room; remove those of killed processes."""
    if not _MEMORY.is_dir():
        return otherwise / "data"
    for stale in _MEMORY.glob(f"{_MARK}-*"):
        if not Path("/proc", stale.name.split("-")[-2]).exists():
            shutil.rmtree(stale, ignore_errors=True)
    if shutil.disk_usage(_MEMORY).free < _ROOM_BYTES:
        return otherwise / "data"
    return Path(tempfile.mkdtemp(prefix=f"{_MARK}-{os.getpid()}-", dir=_MEMORY))


def _plain() -> dict[str, str]:
    """Return an environment without ETCD_* variables, each of which would be a flag."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}


@contextlib.contextmanager
def running(folder: Path, size: int = 1, **options: Any) -> Iterator[Cluster]:
    """Run a cluster of its own for one user; nothing is left of it."""
    with contextlib.ExitStack() as stack:
        for left in reversed(range(_TRIES)):
            cluster = Cluster(folder, size, **options)
            stack.callback(cluster.close)
            try:
                cluster.start()
                break
            except DidNotStart as error:
                if not left or "address already in use" not in str(error):
                    raise
                cluster.close()
        yield cluster


@contextlib.contextmanager
def both(folder: Path) -> Iterator[Facts]:
    """Run a cluster of one member and one of three; yield their addresses."""
    with running(folder / "one") as one, running(folder / "three", 3) as three:
        yield {"one": one.url, "three": three.url}


def main() -> None:
    """Keep both clusters for the tests, or run one by hand."""
    words = words_by_hand(str(__doc__), both, program)
    folder = Path(words[0] if words else tempfile.mkdtemp(prefix="holdfast-etcd-"))
    with running(folder, int(words[1]) if words[1:] else 1) as cluster:
        print(f"{cluster.url}\n# Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
