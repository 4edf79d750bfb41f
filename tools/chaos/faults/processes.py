"""Faults of processes and machines: kill, stop, slow, lose, preempt, join, leave."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from holdfast.tools.chaos.faults.injector import JobAccess, MissedError, Undo, Victim
from holdfast.tools.chaos.scenarios.strikes import Strike

_GRACE_S: Final = 10.0
_SHARE: Final = 0.8
_PERIOD_S: Final = 0.1
"""Period of the duty cycle, shorter than what counts as a stop (`Timing.stop_grace_s`)."""

KINDS: Final = frozenset({"kill", "lose", "stop", "slow", "preempt", "join", "leave"})


class Processes:
    """The injector of ``kill``, ``lose``, ``stop``, ``slow``, ``preempt``, ``join``, ``leave``."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ways: dict[str, Callable[[Strike, Victim, JobAccess], Undo | None]] = {
            "kill": self._kill,
            "lose": self._lose,
            "stop": self._stop,
            "slow": self._slow,
            "preempt": self._preempt,
            "join": self._join,
            "leave": self._leave,
        }

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Do nothing: no preparation is needed."""
        return {}

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """See `Injector`."""
        return self._ways[strike.kind](strike, victim, site)

    def close(self) -> None:
        """End all lasting faults."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _kill(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        with _pinned(victim) as fds:
            _send(fds, signal.SIGKILL)
        return None

    def _lose(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        if not site.lose(victim.node, even_last=strike.target.which == "all"):
            raise MissedError(f"{victim.name} has already ended, or is the last one")
        return lambda: site.give_back(victim.node)

    def _stop(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        fds = _open(victim)
        _send(fds, signal.SIGSTOP)

        def go_on() -> None:
            _send(fds, signal.SIGCONT)
            _close(fds)

        return go_on

    def _slow(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Let the victim run only a part of the time."""
        fds, ended = _open(victim), threading.Event()
        stopped_s = _PERIOD_S * min(max(strike.amount or _SHARE, 0.0), 1.0)

        def hinder() -> None:
            while not ended.is_set():
                _send(fds, signal.SIGSTOP)
                ended.wait(stopped_s)
                _send(fds, signal.SIGCONT)
                ended.wait(_PERIOD_S - stopped_s)
            _close(fds)

        thread = self._begin(hinder)

        def go_on() -> None:
            ended.set()
            thread.join()

        return go_on

    def _preempt(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Send SIGTERM to the first process, as a cluster does; kill all after the grace."""
        fds = _open(victim)
        grace_s = _GRACE_S if strike.amount is None else strike.amount
        _send(fds[:1], signal.SIGTERM)

        def end() -> None:
            if not self._over.wait(grace_s):
                _send(fds, signal.SIGKILL)
            _close(fds)

        self._begin(end)
        return None

    def _leave(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Give a node's agent notice, and nothing else: it leaves in order."""
        with _pinned(victim) as fds:
            _send(fds[:1], signal.SIGTERM)
        return lambda: site.give_back(victim.node)

    def _join(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        there = {each.node for each in site.victims("node")}
        wanted = strike.target.nodes or site.nodes
        absent = [n for n in site.nodes if n not in there and n in wanted]
        if not absent:
            raise MissedError("every node has joined already")
        site.give_back(absent[int(strike.pick * len(absent)) % len(absent)])
        return None

    def _begin(self, work: Callable[[], None]) -> threading.Thread:
        self._threads.append(threading.Thread(target=work, name="fault", daemon=True))
        self._threads[-1].start()
        return self._threads[-1]


def _open(victim: Victim) -> list[int]:
    """Return handles of a victim's processes; they stay theirs even if process ids are reused."""
    fds = []
    for pid in victim.pids:
        with contextlib.suppress(ProcessLookupError):
            fds.append(os.pidfd_open(pid))
    if not fds:
        raise MissedError(f"{victim.name} has no process")
    return fds


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


@contextlib.contextmanager
def _pinned(victim: Victim) -> Iterator[list[int]]:
    fds = _open(victim)
    try:
        yield fds
    finally:
        _close(fds)


def _send(fds: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to all living processes at once."""
    for fd in fds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, number)
