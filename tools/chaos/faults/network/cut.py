"""Network faults: cuts in one or both directions, loss, latency, resets, half-open connections.

They affect the connections between a victim and all others on one machine, and between network
namespaces of one machine. The kernel cuts existing connections (`sockets`); a library loaded before
the C library (`preload`) cuts new ones before they begin.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, get_args

from holdfast.tools.chaos.faults.injector import JobAccess, MissedError, Undo, Victim
from holdfast.tools.chaos.faults.network.kept_up import KeptUp
from holdfast.tools.chaos.faults.network.sockets import End, drop, ends, hear, pairs, reset
from holdfast.tools.chaos.faults.preloaded.preload import CUT, DELAY, Preload
from holdfast.tools.chaos.scenarios.catalogue import Part
from holdfast.tools.chaos.scenarios.scenario import ScenarioError
from holdfast.tools.chaos.scenarios.strikes import Strike

_LOSS: Final = 0.1
_DELAY_S: Final = 0.05
_REMEDY: Final = (
    "the sockets of other processes cannot be reached here: run as root, or set "
    "kernel.yama.ptrace_scope to 0 or 1 (in a container: give it CAP_SYS_PTRACE)"
)
_SCOPE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_DESCENDANTS: Final = 1
"""A setting with which processes can reach those that they started."""

_INTO, _OUT = 1, 2
_SIDES: Final[Mapping[str, int]] = {
    "partition": _INTO | _OUT,
    "partition-in": _INTO,
    "partition-out": _OUT,
    "partition-pair": _INTO | _OUT,
    "network-loss": _INTO | _OUT,
}

KINDS: Final = frozenset({*_SIDES, "network-delay", "network-reset", "half-open"})


class NetworkInjector:
    """Cuts the connections of victims."""

    def __init__(self) -> None:
        self._cuts: list[_Cut] = []

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Compile the library that is loaded before the C library. Raises ``ScenarioError``."""
        for strike in strikes:
            if strike.kind == "network-loss" and not 0 < (strike.amount or _LOSS) <= 1:
                raise ScenarioError(
                    f"strike {strike.number} (network-loss): amount is {strike.amount:g}, the "
                    "share of packets that are lost: more than 0, 1 at most"
                )
        _require_borrowing()
        self._preload = Preload(site)
        return self._preload.environment

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Strike now."""
        try:
            return self._strike(strike, victim, site)
        except PermissionError as error:
            raise ScenarioError(f"{victim.name}: {error.strerror}; {_REMEDY}") from error

    def _strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        if not victim.pids:
            raise MissedError(f"{victim.name}: it has no process")
        if strike.kind == "network-delay":
            seconds = _DELAY_S if strike.amount is None else strike.amount
            undo = self._preload.add(DELAY, victim.pids, delay_ns=int(seconds * 1e9))
            return undo if strike.lasts_s else None
        if strike.kind == "network-reset":
            _reset(victim, site)
            return None
        if strike.kind == "half-open":
            _half_open(victim, site)
            return None
        cut = _Cut(strike, victim, site, self._preload)
        self._cuts.append(cut)
        return cut.end if strike.lasts_s else None

    def close(self) -> None:
        """Remove all cuts."""
        for cut in self._cuts:
            cut.end()


class _Cut:
    """A cut that stays in force until its end, also for new connections and new processes."""

    def __init__(self, strike: Strike, victim: Victim, site: JobAccess, preload: Preload) -> None:
        self._sides, self._victim, self._site = _SIDES[strike.kind], victim, site
        self._preload = preload
        self._share = 1.0
        if strike.kind == "network-loss":
            self._share = _LOSS if strike.amount is None else strike.amount
        self._other = _other(strike, victim, site) if strike.kind == "partition-pair" else None
        self._rules: list[Callable[[], None]] = []
        self._ruled: object = None
        self._kept_up = KeptUp(self._apply, name="chaos-cut")

    def end(self) -> None:
        """Remove the cut; a second call does nothing."""
        self._kept_up.end()
        while self._rules:
            self._rules.pop()()
        for end in ends(_everybody(self._site)):
            if not end.listens:
                hear(end)

    def _apply(self) -> None:
        """Cut all connections that cross now."""
        inside, site = _now(self._victim, self._site), self._site
        outside = _now(self._other, site) if self._other else _everybody(site) - inside
        ours, theirs = ends(inside), ends(outside)
        self._rule(inside, _ports(ours), outside, _ports(theirs))
        for near, far in pairs(ours, theirs):
            if self._other and far is None:
                continue
            if self._sides & _INTO:
                drop(near, self._share)
            if far and self._sides & _OUT:
                drop(far, self._share)

    def _rule(
        self, inside: set[int], ports: list[int], outside: set[int], far_ports: list[int]
    ) -> None:
        """Have the library cut new connections before they begin."""
        wanted = (inside, ports, outside, far_ports) if self._other else (inside, ports)
        if wanted == self._ruled:
            return
        old, self._rules, self._ruled = self._rules, [], wanted
        add, share = self._preload.add, self._share
        if self._other:
            self._rules.append(add(CUT, inside, ports=far_ports, share=share, ops=1))
            self._rules.append(add(CUT, outside, ports=ports, share=share, ops=1))
        else:
            self._rules.append(add(CUT, inside, ports=ports, share=share))
        for take_back in old:
            take_back()


def _reset(victim: Victim, site: JobAccess) -> None:
    crossing = pairs(ends(victim.pids), ends(_everybody(site) - set(victim.pids)))
    if not sum(reset(near) for near, _ in crossing):
        raise MissedError(f"{victim.name}: it has no connection to another")


def _half_open(victim: Victim, site: JobAccess) -> None:
    """End the victim's side; the other side notices nothing until it sends something."""
    crossing = pairs(ends(victim.pids), ends(_everybody(site) - set(victim.pids)))
    known = [(near, far) for near, far in crossing if far]
    if not known:
        raise MissedError(f"{victim.name}: it has no connection to another on this machine")
    for near, far in known:
        drop(far)
        reset(near)
        hear(far)


def _other(strike: Strike, victim: Victim, site: JobAccess) -> Victim:
    others = [each for each in site.victims("node") if each.name != victim.name]
    if not others:
        raise MissedError(f"{victim.name}: there is no other node")
    return others[int(strike.pick * len(others)) % len(others)]


def _now(victim: Victim, site: JobAccess) -> set[int]:
    """Return a victim's processes, including those started since the strike."""
    same = (each for each in site.victims(victim.part) if each.name == victim.name)
    return {*victim.pids, *(pid for each in same for pid in each.pids)}


def _everybody(site: JobAccess) -> set[int]:
    """Return the processes of the job, and this one, which may be its launcher."""
    parts: Iterable[Part] = get_args(Part)
    return {os.getpid(), *(pid for p in parts for each in site.victims(p) for pid in each.pids)}


def _ports(found: list[End]) -> list[int]:
    return sorted({end.local[1] for end in found if end.listens})


def _require_borrowing() -> None:
    """Raise ``ScenarioError`` if the system or its settings forbid borrowing sockets."""
    with contextlib.suppress(OSError):
        if os.geteuid() and int(_SCOPE.read_text()) > _DESCENDANTS:
            raise ScenarioError(f"{_SCOPE} forbids it; {_REMEDY}")
    with socket.socket() as own:
        try:
            drop(_own_end(own))
        except OSError as error:
            if error.errno == errno.ENOSYS:
                raise ScenarioError("faults of the network need Linux 5.6 or newer") from error
            raise ScenarioError(f"{error.strerror}; {_REMEDY}") from error


def _own_end(own: socket.socket) -> End:
    nowhere = ("0.0.0.0", 0)
    return End(
        pid=os.getpid(),
        fd=own.fileno(),
        inode=os.fstat(own.fileno()).st_ino,
        local=nowhere,
        remote=nowhere,
        listens=False,
    )
