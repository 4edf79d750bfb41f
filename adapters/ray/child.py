"""``holdfast run`` as a child of a node's actor, which ends with it in any case."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from holdfast.adapters.ray.job import NodeFacts, RayJob, run_words
from holdfast.ckpt.descriptors import readable
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.events.job import JobEnded
from holdfast.elastic.events.log import events_file
from holdfast.elastic.events.wire import EventFormatError, decode_line
from holdfast.elastic.launch.run_folder import KEY, lock_run_dir
from holdfast.elastic.processes import run_dirs
from holdfast.elastic.processes.children import Child, describe_exit

MOST_LINES: Final = 200
"""The last lines of a node's output that come back with its end."""

LOOK_S: Final = 1.0
"""Time between two looks for a drain."""

_WAIT_S: Final = 0.2
_BYTES: Final = 1 << 16
_TAIL_BYTES: Final = 1 << 16
_LINE_BYTES: Final = 1 << 14
_LAST_WORDS_S: Final = 2.0
_COMMAND: Final = ("-u", "-P", "-m", "holdfast.tools.cli", "run")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnd:
    """The end of ``holdfast run``: its exit status as ``Popen`` has it, and the reason in words."""

    status: int
    message: str
    log: tuple[str, ...]
    left: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """The address of a job's coordinator, and the job's name there."""

    coordinator: str
    job: str


class HoldfastRun:
    """``holdfast run`` on this machine, with its key, its notice and its output.

    ``say`` gets every line of the output. ``foretold`` is asked every second whether the node is
    about to end.
    """

    def __init__(
        self,
        job: RayJob,
        *,
        key: RunKey,
        say: Callable[[str], None],
        foretold: Callable[[], bool],
    ) -> None:
        self._job, self._key = job, key
        self._say, self._foretold = say, foretold
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._told = threading.Event()
        self._signalling = threading.Lock()  # a second SIGTERM would kill where the first one asks
        self._stopped = False
        self._child: Child | None = None

    def run(self, place: JobPlace, *, node: str, host: str, env: Mapping[str, str]) -> ChildEnd:
        """Run it to its end; the kernel ends it if the calling thread ends before.

        Raises ``ConfigError`` if there is no place for its files, ``OSError`` without processes.
        """
        own = run_dirs.make()
        lock = lock_run_dir(own, temporary=True)  # whoever comes next removes it, if we cannot
        try:
            key_file, output = own / KEY, own / "output"
            self._key.save(key_file)
            os.mkfifo(output, 0o600)  # no file that grows as long as the job runs
            kept = self._job.options.run_dir
            run_dir = Path(kept, node) if kept else own / "run"
            facts = NodeFacts(
                job=place.job,
                node=node,
                host=host,
                key_file=str(key_file),
                notice_file=str(own / "notice"),
                run_dir=str(run_dir),
            )
            words = run_words(self._job, place.coordinator, facts)
            reading = os.open(output, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                child = Child.start(
                    (sys.executable, *_COMMAND, *words), env=env, tied=True, output=output
                )
                with self._signalling:
                    self._child = child
                    if self._stopped:
                        child.signal(signal.SIGTERM)
                self._follow(child, reading, Path(facts.notice_file))
            finally:
                os.close(reading)
            return self._ended(child.code or 0, run_dir)
        finally:
            lock.close()
            shutil.rmtree(own, ignore_errors=True)

    def stop(self) -> None:
        """Ask it to end in order."""
        with self._signalling:
            if self._child is not None and not self._stopped:
                self._child.signal(signal.SIGTERM)
            self._stopped = True

    def leave(self) -> None:
        """Give it a notice: its node hands over and leaves."""
        self._told.set()

    def _follow(self, child: Child, reading: int, notice: Path) -> None:
        """Pass its output on and look for drains until it has ended."""
        rest, looked_s, over_s = b"", 0.0, 0.0
        while True:
            if child.alive:
                child.poll()
            elif not over_s:
                over_s = time.monotonic() + _LAST_WORDS_S  # what it left behind may hold the pipe
            if time.monotonic() - looked_s > LOOK_S:
                looked_s = time.monotonic()
                self._look(notice)
            part = self._read(reading)
            rest = self._pass_on(rest + part)
            if over_s and (not part or time.monotonic() > over_s):
                break
        if rest:
            self._hear(rest)

    def _look(self, notice: Path) -> None:
        if not notice.exists() and (self._told.is_set() or self._foretold()):
            self._told.set()
            notice.touch()

    def _read(self, reading: int) -> bytes:
        """Return bytes of the output, none if there are none for a moment."""
        if not readable([reading], _WAIT_S):
            return b""
        try:
            part = os.read(reading, _BYTES)
        except BlockingIOError:
            return b""
        if not part:  # nobody writes any more; the exit status follows in a moment
            time.sleep(_WAIT_S / 10)
        return part

    def _pass_on(self, said: bytes) -> bytes:
        """Pass whole lines on; return the rest, which is passed on too if it is very long."""
        *lines, rest = said.split(b"\n")
        for line in lines:
            self._hear(line)
        if len(rest) > _LINE_BYTES:
            self._hear(rest)
            rest = b""
        return rest

    def _hear(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self._lines.append(text)
        self._say(text)

    def _ended(self, status: int, run_dir: Path) -> ChildEnd:
        last = next((line for line in reversed(self._lines) if line.strip()), "")
        message = _why(run_dir) or last.removeprefix("holdfast: ") or describe_exit(status)
        return ChildEnd(
            status=status, message=message, log=tuple(self._lines), left=self._told.is_set()
        )


def _why(run_dir: Path) -> str:
    """Return the launcher's own last word about the job, empty if there is none."""
    try:
        with events_file(run_dir, "launcher").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        with contextlib.suppress(EventFormatError):
            for event in decode_line(line):
                if isinstance(event, JobEnded):
                    return event.message
    return ""


def key_text(key: RunKey) -> str:
    """Return a key as text, to be sent to a node."""
    return msgspec.json.encode(key).decode()


def key_of(text: str) -> RunKey:
    """Return the key of `key_text`."""
    return msgspec.json.decode(text, type=RunKey)
