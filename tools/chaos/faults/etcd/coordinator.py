"""Faults of etcd: a restart, latency, a lost leader, a compacted history, a revoked lease.

The etcd is the one on this machine at the address in `COORDINATOR_ENV`, otherwise one that is
started for the run. The embedded coordinator is part of the launching process and cannot be hit
alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from holdfast.elastic.coordinator.etcd.address import EtcdAddress
from holdfast.elastic.membership.view import node_key, run_prefix
from holdfast.tools.chaos.faults.etcd.etcd_process import EtcdProcess
from holdfast.tools.chaos.faults.etcd.own_etcd import OwnEtcd
from holdfast.tools.chaos.faults.injector import JobAccess, MissedError, Undo, Victim
from holdfast.tools.chaos.faults.network.sockets import ends
from holdfast.tools.chaos.scenarios.scenario import COORDINATOR_ENV, ScenarioError
from holdfast.tools.chaos.scenarios.strikes import Strike

_LATENCY_S: Final = 0.1
_RUNS_S: Final = 0.01
_JOIN_S: Final = 10.0
_THREE: Final = 3
"""With this many members etcd survives the loss of one."""

KINDS: Final = frozenset(
    {
        "coordinator-restart",
        "coordinator-latency",
        "coordinator-compaction",
        "leader-kill",
        "lease-lost",
    }
)


class CoordinatorInjector:
    """Strikes the members of an etcd, and restarts those that are to return."""

    def __init__(self) -> None:
        self._own: OwnEtcd | None = None
        self._pids: list[int] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._over = threading.Event()
        self._slowing: list[threading.Thread] = []
        self._lock = threading.Lock()

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Find or start the etcd; start three members if a leader is to be killed."""
        if not site.run:
            raise ScenarioError(
                "faults of the coordinator are for jobs that Holdfast starts (workload.nodes): "
                "Holdfast cannot find the coordinator of another job"
            )
        for strike in strikes:
            if strike.kind == "coordinator-restart" and not strike.lasts_s:
                raise ScenarioError(
                    f"strike {strike.number} (coordinator-restart): lasts_s is how long it is "
                    "down; give more than 0"
                )
        if address := os.environ.get(COORDINATOR_ENV):
            self._pids = _local(address)
            return {}
        leader = any(strike.kind == "leader-kill" for strike in strikes)
        self._own = OwnEtcd(site.folder / "etcd", size=_THREE if leader else 1)
        self._pids = [process.pid for process in self._own.processes]
        return {COORDINATOR_ENV: self._own.address}

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Strike now. Raises ``ScenarioError`` for a job that uses another coordinator."""
        match strike.kind:
            case "coordinator-restart":
                self._check(site)
                return self._kill(self._members(), strike)
            case "leader-kill":
                self._check(site)
                return self._kill([self._leader()], strike)
            case "coordinator-latency":
                self._check(site)
                return self._slow(strike)
            case "lease-lost":
                self._revoke(strike, victim, site)
            case _:
                member, _, revision = self._check(site)
                member.ask("/v3/kv/compaction", revision=revision, physical=True)
        return None

    def close(self) -> None:
        """Wake slowed members, and end the processes started here."""
        self._over.set()
        for thread in self._slowing:
            thread.join(_JOIN_S)
        for process in self._started:
            process.kill()
            process.wait()
        if self._own:
            self._own.close()

    def _members(self) -> list[EtcdProcess]:
        """Return the living members."""
        with self._lock:
            pids = list(self._pids)
        found = []
        for pid in pids:
            with contextlib.suppress(MissedError):
                found.append(EtcdProcess(pid))
        if not found:
            raise MissedError("no member of etcd runs now")
        return found

    def _check(self, site: JobAccess) -> tuple[EtcdProcess, dict[bytes, int], int]:
        """Return a member that answers, the lease of every key, and the revision."""
        for member in self._members():
            with contextlib.suppress(MissedError):
                entries, revision = member.entries()
                if not any(f"/{run_prefix(site.run)}".encode() in b"/" + key for key in entries):
                    raise ScenarioError(
                        "the job does not use this etcd: an embedded coordinator runs in the "
                        "process that started the job, and no fault can hit it alone; set "
                        'coordinator = "etcd" in the workload'
                    )
                return member, entries, revision
        raise MissedError("no member of etcd answers now")

    def _leader(self) -> EtcdProcess:
        for member in self._members():
            if member.leads():
                return member
        raise MissedError("no member of etcd leads now")

    def _kill(self, members: list[EtcdProcess], strike: Strike) -> Undo | None:
        for member in members:
            member.kill()

        def start_again() -> None:
            with self._lock:
                for member in members:
                    process = member.start_again()
                    self._started.append(process)
                    self._pids[self._pids.index(member.pid)] = process.pid

        return start_again if strike.lasts_s else None

    def _slow(self, strike: Strike) -> Undo | None:
        """Let all members run only briefly between stops: a request waits up to ``amount`` s."""
        pidfds = [os.pidfd_open(member.pid) for member in self._members()]
        passed = threading.Event()
        stopped_s = _LATENCY_S if strike.amount is None else strike.amount

        def pause() -> None:
            try:
                while not (passed.is_set() or self._over.is_set()):
                    _send(pidfds, signal.SIGSTOP)
                    passed.wait(stopped_s)
                    _send(pidfds, signal.SIGCONT)
                    self._over.wait(_RUNS_S)
            finally:
                for pidfd in pidfds:
                    os.close(pidfd)

        thread = threading.Thread(target=pause, name="chaos-latency", daemon=True)
        self._slowing.append(thread)
        thread.start()

        def undo() -> None:
            passed.set()
            thread.join(_JOIN_S)

        return undo if strike.lasts_s else None

    def _revoke(self, strike: Strike, victim: Victim, site: JobAccess) -> None:
        """Revoke the lease of a node's agent, or of any agent if the coordinator is hit."""
        member, entries, _ = self._check(site)
        ending = node_key(site.run, victim.node).encode() if victim.node else b""
        leases = sorted({lease for key, lease in entries.items() if lease and key.endswith(ending)})
        if not leases:
            raise MissedError(f"{victim.name}: it holds no lease now")
        lease = leases[int(strike.pick * len(leases)) % len(leases)]
        member.ask("/v3/lease/revoke", ID=str(lease))


def _local(address: str) -> list[int]:
    """Return the processes that serve an address. Raises ``ScenarioError`` if none is local."""
    parsed = EtcdAddress.parse(address)
    ports = {int(endpoint.rpartition(":")[2]) for endpoint in parsed.endpoints}
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    etcds = [pid for pid in pids if _program(pid) == "etcd"]
    found = {end.pid for end in ends(etcds) if end.listens and end.local[1] in ports}
    if not found:
        raise ScenarioError(
            f"{COORDINATOR_ENV} is {address}: no etcd of this machine listens there; start one "
            "here, or unset the variable and put etcd on the PATH"
        )
    return sorted(found)


def _program(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink().name
    return ""


def _send(pidfds: Iterable[int], number: signal.Signals) -> None:
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)
