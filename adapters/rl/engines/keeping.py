"""A server of answers as a worker of a job: started, watched, announced, drained, ended.

Its process is replaced like that of every worker: if the server ends or hangs, its keeper reports
it and ends too, and the agent of the node, or of another, starts both anew.
"""

from __future__ import annotations

import http.client
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from holdfast.adapters.rl.config import ROLE
from holdfast.adapters.rl.engines.announced import Announcement
from holdfast.adapters.rl.engines.server_process import ServerProcess
from holdfast.ckpt import checks
from holdfast.ckpt.types import Json
from holdfast.elastic.channel.base import WORKER_ENV, Channel, WorkerPhase
from holdfast.elastic.channel.connecting import connect
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.elastic.events import UserEvent
from holdfast.elastic.processes.children import describe_exit

_log = logging.getLogger(__name__)

READY: Final = "engine_ready"
"""The event of a server that is ready: its ``url``, and ``group``, that of its processes."""

_POLL_S: Final = 0.1
_LOOK_S: Final = 1.0
_DRAIN_S: Final = 1.5
_STOP_S: Final = 3.0

_RULES: Final[Mapping[str, checks.Rule]] = {
    "start_s": checks.number(0.0, 1e9, remedy="give seconds", above=True),
    "silence_s": checks.number(0.0, 1e9, remedy="give seconds", above=True),
}


def keep_server(
    directory: str | Path,
    command: Sequence[str],
    *,
    ready: str = "/health",
    role: str = ROLE,
    host: str = "127.0.0.1",
    start_s: float = 1800.0,
    silence_s: float = 60.0,
) -> bool:
    """Run a server in the workers of ``role``, and return True when the job is over.

    In every other process it returns False at once. ``command`` is the argv; in it ``{port}``
    stands for a free port and ``{host}`` for ``host``, at which others reach this machine. The
    server is announced in ``directory`` from the time at which ``GET ready`` succeeds, for which it
    has ``start_s``. It counts as hung after ``silence_s`` without an answer to that. When the node
    gets notice the announcement is withdrawn, so that pools move its answers, with their tokens.
    If the server ends or hangs this process reports it and ends: the job starts another one. The
    event ``engine_ready`` has its address, and its process group.

    With ``role=""`` it runs the server in any process, without a job, until SIGTERM; it raises
    ``JobFailedError`` if the server ends. Raises ``ConfigError`` for a program that is not there.
    """
    keeper = _ServerKeeper(
        directory=directory,
        command=tuple(command),
        ready=ready,
        host=host,
        start_s=start_s,
        silence_s=silence_s,
    )
    if not role:
        with _told_to_end() as over:
            keeper.run(_PartAlone(over))
        return True
    if WORKER_ENV not in os.environ:
        return False
    channel = connect()
    if channel.role != role:
        return False
    try:
        keeper.run(_PartOfJob(channel))
    except (ConfigError, JobFailedError) as error:
        channel.fail(str(error), user_error=isinstance(error, ConfigError))
        sys.stderr.write(f"holdfast: {error}\n")
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error
    channel.done()
    return True


@dataclass(frozen=True, kw_only=True)
class _ServerKeeper:
    """Runs one server; the fields are the arguments of `keep_server`."""

    directory: str | Path
    command: tuple[str, ...]
    ready: str
    host: str
    start_s: float
    silence_s: float

    def __post_init__(self) -> None:
        checks.check_fields(self, _RULES, error=ConfigError)
        if not any("{port}" in word for word in self.command):
            raise ConfigError(
                f"keep_server(command={list(self.command)}): let it have {{port}}, which stands "
                "for the port that the server gets"
            )

    def run(self, part: _Part) -> None:
        """Run the server until the part is over.

        Raises ``JobFailedError`` if it ends or hangs, ``ConfigError`` if there is no such program.
        """
        port = _free_port(self.host)
        url = f"http://{self.host}:{port}"
        command = [
            word.replace("{port}", str(port)).replace("{host}", self.host) for word in self.command
        ]
        server = ServerProcess(command, without=(WORKER_ENV,))
        try:
            health = _Health(self.host, port, self.ready, limit_s=self.silence_s)
            while health.heard_s is None and not part.over():
                self._check(server)
                if time.monotonic() > health.began_s + self.start_s:
                    raise JobFailedError(
                        f"{url}: no success of GET {self.ready} within {self.start_s:g} s: look at "
                        "the server's output, or give it more with start_s"
                    )
                part.wait(_POLL_S)
            if not part.over():
                self._serve(server, health, part, url=url)
        finally:
            server.stop(grace_s=_STOP_S)

    def _serve(self, server: ServerProcess, health: _Health, part: _Part, *, url: str) -> None:
        announcement = Announcement(self.directory, url)
        part.began(url, server.pid)
        try:
            while not part.over() and not part.leaving():
                self._check(server)
                if (silent_s := health.silent_s()) > self.silence_s:
                    server.kill()
                    raise JobFailedError(
                        f"the server at {url} hangs: GET {self.ready} has not succeeded for "
                        f"{silent_s:.1f} s"
                    )
                part.wait(_POLL_S)
        finally:
            announcement.withdraw()
        until_s = time.monotonic() + _DRAIN_S  # pools take their answers elsewhere
        while not part.over() and time.monotonic() < until_s:
            part.wait(_POLL_S)
        part.left()

    def _check(self, server: ServerProcess) -> None:
        if (code := server.ended()) is not None:
            raise JobFailedError(
                f"the server ended with {describe_exit(code)} ({' '.join(self.command)[:200]}): "
                "look at its output"
            )


class _Health:
    """Asks a server for its health, on a thread; ``heard_s`` is the time of the last success."""

    def __init__(self, host: str, port: int, path: str, *, limit_s: float) -> None:
        self._host, self._port, self._path, self._limit_s = host, port, path, limit_s
        self.began_s = time.monotonic()
        self.heard_s: float | None = None
        threading.Thread(target=self._watch, name="health of a server", daemon=True).start()

    def silent_s(self) -> float:
        """Return the seconds since the last success."""
        return time.monotonic() - (self.began_s if self.heard_s is None else self.heard_s)

    def _watch(self) -> None:
        pause = threading.Event()
        while True:
            if self._ask():
                self.heard_s = time.monotonic()
            pause.wait(_POLL_S if self.heard_s is None else min(_LOOK_S, self._limit_s / 4))

    def _ask(self) -> bool:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._limit_s)
        try:
            connection.request("GET", self._path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class _Part(Protocol):
    """The part of a keeper's process in its surroundings."""

    def over(self) -> bool:
        """Say whether the server is no longer needed."""

    def leaving(self) -> bool:
        """Say whether its answers should go elsewhere."""

    def wait(self, seconds: float) -> None:
        """Wait a little, and show that the process lives."""

    def began(self, url: str, group: int) -> None:
        """Tell others that the server is ready, with the number of its process group."""

    def left(self) -> None:
        """Tell others that nothing is left here; return when the process may end."""


class _PartOfJob:
    """A worker of a job."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._pause, self._beats = channel, threading.Event(), 0

    def over(self) -> bool:
        """See `_Part`."""
        return self._channel.stopped()

    def leaving(self) -> bool:
        """See `_Part`."""
        return self._channel.leaving()

    def wait(self, seconds: float) -> None:
        """See `_Part`."""
        self._beats += 1
        self._channel.beat(step=self._beats, phase=WorkerPhase.IDLE)
        self._pause.wait(seconds)

    def began(self, url: str, group: int) -> None:
        """See `_Part`."""
        self._channel.ready(after=0, spec=None, info={"server": url})
        fields: dict[str, Json] = {"url": url, "group": group}
        self._channel.emit(UserEvent(name=READY, fields=fields))

    def left(self) -> None:
        """See `_Part`."""
        generation = self._channel.roster().generation
        if generation is not None and self._channel.leaving():
            self._channel.handed_over(generation=generation.number, step=self._beats)
        while not self._channel.stopped():
            self.wait(_POLL_S)  # the agent ends it


class _PartAlone:
    """A process that no job started, until SIGTERM."""

    def __init__(self, told: threading.Event) -> None:
        self._told, self._pause = told, threading.Event()

    def over(self) -> bool:
        """See `_Part`."""
        return False

    def leaving(self) -> bool:
        """See `_Part`."""
        return self._told.is_set()

    def wait(self, seconds: float) -> None:
        """See `_Part`."""
        self._pause.wait(seconds)

    def began(self, url: str, group: int) -> None:
        """See `_Part`."""
        _log.info("%s is ready; its process group is %d", url, group)

    def left(self) -> None:
        """See `_Part`."""


@contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """Note SIGTERM while the body lasts."""
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listening:
        port: int = listening.getsockname()[1]
    return port
