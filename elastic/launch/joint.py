"""One job with several launchers; each starts the nodes of its machine.

They meet at a coordinator: an etcd, or one that the launcher on the named host serves. The first
launcher writes the job's record (its run, its number of workers, its settings), which the others
read. Each launcher then takes a number under a lease. If a launcher is lost, its nodes are lost
with it; it may come back at any time. A launcher that keeps its run directory serves the
coordinator in a process of its own, which outlives it and holds the memory of its nodes; if that
process ends too, it is started again with its journal by the launcher or by its successor, and the
other launchers wait for that. A launcher with a temporary run directory serves the coordinator
itself, and the job ends with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.ckpt.transport import RunKey
from holdfast.ckpt.types import Json, learn
from holdfast.elastic.agent.config import AgentTiming
from holdfast.elastic.agent.lease import LeaseKeeper
from holdfast.elastic.channel.shared_key import shared_key
from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.coordinator.connecting import connect, is_etcd
from holdfast.elastic.coordinator.embedded import EmbeddedServer
from holdfast.elastic.coordinator.service import LauncherRecord, launcher_key
from holdfast.elastic.errors import ConfigError, CoordinatorError, LeaseExpiredError
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.launch.coordinator_process import CoordinatorProcess
from holdfast.elastic.launch.local import Launcher
from holdfast.elastic.launch.run_folder import KEY
from holdfast.elastic.membership.records import JobOutcome
from holdfast.elastic.membership.view import decode, encode, generation_key, outcome_key
from holdfast.elastic.rendezvous.link import CoordinatorPlace, address_towards, is_free

JOIN_S = 600.0
"""Time that a launcher waits for the coordinator and for enough others."""

_CALL_S = 2.0
_RETRY_S = 0.2
_FAREWELL_S = 15.0
_FAREWELL_POLL_S = 0.05
_SILENT_S = 30.0
_REPORT_S = 5.0
_LEAVE_MARGIN_S = 5.0
_MAX_NUMBER = 1 << 16
_PRESENCE = AgentTiming(lease_ttl_s=5.0, self_fence_s=4.0, keep_alive_s=1.0)
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class SharedJobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all launchers of a job share.

    ``ended`` lets the next job of that name begin. ``machines`` is the full number of launchers.
    ``return_s`` is the time for which they wait for a coordinator that does not answer.
    """

    run: str
    machines: int
    wanted: dict[str, int]
    settings: dict[str, Json] = {}
    ended: bool = False
    return_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JointConfig:
    """The meeting place of a job's launchers, and this launcher's part.

    Before the job first begins, it waits up to ``join_s`` seconds for ``least`` launchers; ``most``
    are expected. ``host`` is this machine's address for the others; empty: that of the route to the
    coordinator. ``number`` is this launcher's number, None for any free one. ``joins``: the job
    exists already; this launcher must not begin one.
    """

    place: CoordinatorPlace
    key_file: Path
    job: str = "job"
    least: int = 1
    most: int = 1
    number: int | None = None
    joins: bool = False
    join_s: float = JOIN_S
    host: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"--nnodes {self.least}:{self.most}: give MIN:MAX, 1 or more")
        if self.number is not None and not 0 <= self.number < _MAX_NUMBER:
            raise ConfigError(f"--node-rank {self.number}: give a number from 0 up")
        if not self.job or "/" in self.job:
            raise ConfigError(f"--job {self.job!r}: give a name without '/'")

    @property
    def key(self) -> str:
        """The key of the job's record."""
        return f"jobs/{self.job}/record"

    @property
    def launchers(self) -> str:
        """The prefix of the launchers' keys."""
        return f"jobs/{self.job}/launchers/"


class JointLauncher(Launcher):
    """A `Launcher` for some of a job's nodes.

    ``config.wanted`` is the number of workers of the whole job; it counts only on the launcher that
    begins the job.
    """

    def __init__(self, config: LaunchConfig, joint: JointConfig) -> None:
        super().__init__(config)
        self._joint = joint
        self._presence: LeaseKeeper | None = None
        self._leasing: Coordinator | None = None
        self._number, self._number_lease = -1, -1
        self._heard_s, self._patience_s = time.monotonic(), _SILENT_S
        self._waits = False
        self._leaving_s = 0.0
        self._over = False

    # -- the beginning ---------------------------------------------------------------------------

    def _connect(self) -> None:
        """Serve or reach the coordinator, read the job's record, and wait for enough launchers."""
        before = self._server
        if before is None:
            self.key: RunKey = shared_key(self._joint.key_file)
            self.key.save(self.run_dir / KEY)
            self._server = self._serve_others()
        joint = self._joint  # with the place where the coordinator now is
        self.coordinator_address = joint.place.url
        self._coordinator = connect(joint.place.url, self.key, timeout_s=_CALL_S)
        deadline_s = time.monotonic() + joint.join_s
        try:
            if before is not None:
                self._patiently(self._return, deadline_s=deadline_s)
            record = self._patiently(self._job, deadline_s=deadline_s)
            number = self._patiently(self._take_number, deadline_s=deadline_s)
            self._take(record, number)
            if before is not None:
                self._take_over(number=number)
            elif isinstance(self._server, CoordinatorProcess):
                self._sign(number=number)
            self._patiently(self._enough, deadline_s=deadline_s)
        except BaseException:
            self._depart()
            self._coordinator.close()
            if self._server and before is None:
                self._server.close()
                self._server = None
            raise

    def _bind(self) -> str:
        return "" if self._joint.joins else self._joint.place.bind()

    def _can_go_on(self, run: str) -> bool:
        """The memory of other machines may be there, whatever this one lost."""
        return True

    def _serve_others(self) -> EmbeddedServer | CoordinatorProcess | None:
        """Serve the coordinator; None if this is not its machine, or another launcher serves it."""
        if not (bind := self._bind()) or not is_free(bind):
            return None
        try:
            return self._serve()
        except CoordinatorError as error:
            if is_free(bind):
                _log.warning("%s", error)
            return None

    def _return(self) -> bool:
        """Take the number that the killed launcher of this run directory had."""
        entry = self._coordinator.get(launcher_key(self.run))
        record = decode(entry.key, entry.value, LauncherRecord) if entry else None
        if record and record.number >= 0:
            ours = msgspec.structs.replace(record, pid=os.getpid())
            self._coordinator.put(launcher_key(self.run), encode(ours))
            self._coordinator.delete(f"{self._joint.launchers}{record.number}")
            self._joint = dataclasses.replace(self._joint, number=record.number)
        return True

    def _patiently(self, attempt: Callable[[], _T | str], *, deadline_s: float) -> _T:
        """Retry ``attempt`` until it returns something other than a reason to wait; return that."""
        reported = ""
        while True:
            try:
                found = attempt()
            except CoordinatorError as error:
                found = f"{error}; check the address and that all launchers have the same key file"
            if not isinstance(found, str):
                return found
            if self._stop_reason is not None:
                raise ConfigError(f"{self._stop_reason} while waiting: {found}")
            if time.monotonic() > deadline_s:
                raise CoordinatorError(
                    f"job {self._joint.job} did not begin within {self._joint.join_s:g} s: {found}"
                )
            if found != reported:
                reported = found
                _log.warning("waiting: %s", found)
            time.sleep(_RETRY_S)

    def _job(self) -> SharedJobRecord | str:
        """Return the job's record; write it if this launcher begins the job."""
        joint = self._joint
        entry = self._coordinator.get(joint.key)
        if entry:
            record = decode(entry.key, entry.value, SharedJobRecord)
            if not record.ended or record.run == self.run:
                return record
        if joint.joins and entry:
            raise ConfigError(f"job {joint.job} has ended: begin it without --join")
        if joint.joins or not self._may_begin():
            return f"nobody has begun job {joint.job} yet"
        fresh = SharedJobRecord(
            run=self.run,
            machines=joint.most,
            wanted=dict(self.config.wanted),
            settings=dict(self.config.settings),
            return_s=self.config.return_s,
        )
        done = self._coordinator.compare_and_set(
            joint.key, encode(fresh), expected=entry.revision if entry else 0
        )
        return fresh if done else "another launcher begins the job"

    def _may_begin(self) -> bool:
        """Return whether the job may begin with this launcher."""
        return self._server is not None or is_etcd(self._joint.place.url)

    def _take_number(self) -> int | str:
        """Take this launcher's number, or the lowest free one, under a lease."""
        number = self._joint.number
        return self._claim(range(_MAX_NUMBER) if number is None else [number])

    def _claim(self, numbers: Iterable[int]) -> int | str:
        joint = self._joint
        if self._leasing is None:
            self._leasing = connect(joint.place.url, self.key, timeout_s=_CALL_S)
        presence = self._presence or LeaseKeeper(
            self._leasing, timing=_PRESENCE, fence=lambda: None, lost=self._presence_lost
        )
        self._presence = presence
        for number in numbers:
            key = f"{joint.launchers}{number}"
            said = self._presence_record()
            if self._coordinator.compare_and_set(key, said, expected=0, lease=presence.lease):
                self._number, self._number_lease = number, presence.lease
                return number
        return (
            f"another launcher is number {joint.number}, or the coordinator has not noticed its "
            "end yet"
        )

    def _presence_record(self) -> str:
        """Return the value of this launcher's key."""
        return "{}"

    def _presence_lost(self) -> None:
        """Note the loss, on the lease's thread; `_stay` claims the number again."""
        self._presence = None

    def _stay(self) -> None:
        """Claim this launcher's number again if its lease was lost, as after a network outage."""
        presence = self._presence
        if presence is not None and presence.lease == self._number_lease:
            return
        try:
            entry = self._coordinator.get(self._joint.key)
            record = decode(entry.key, entry.value, SharedJobRecord) if entry else None
            if record is None or record.run != self.run:
                self.stop(
                    f"the coordinator at {self._joint.place.address} was started anew and does not "
                    "know this job: start this command again to join the one that it serves"
                )
                return
            self._claim([self._number])
        except LeaseExpiredError:
            self._presence = None
        except CoordinatorError:
            pass  # tried again in a moment

    def _take(self, record: SharedJobRecord, number: int) -> None:
        """Set this launcher's configuration from the job's record."""
        self.run = record.run
        self._patience_s = max(_SILENT_S, record.return_s)
        nodes = self.config.nodes
        names = [f"node{number}"] if len(nodes) == 1 else []
        names = names or [f"node{number}-{i}" for i in range(len(nodes))]
        self.config = dataclasses.replace(
            self.config,
            nodes=tuple(
                NodeSpec(name=name, domain=node.domain or f"machine{number}", slots=node.slots)
                for name, node in zip(names, nodes, strict=True)
            ),
            wanted=record.wanted,
            settings=record.settings,
            elsewhere=max(record.machines - 1, 1) * len(nodes),
            host=self._joint.host or address_towards(self._joint.place.host),
        )

    def _enough(self) -> bool | str:
        """Return True if the job may begin or has begun already, else the reason to wait."""
        if self._coordinator.get(generation_key(self.run)):
            return True
        there, _ = self._coordinator.range(self._joint.launchers)
        if len(there) >= self._joint.least:
            return True
        return f"{len(there)} of {self._joint.least} launchers are there"

    # -- while the job runs ----------------------------------------------------------------------

    def _hopeless(self) -> str | None:
        """Return why this launcher cannot continue; it ignores other launchers' nodes."""
        if self._due or any(agent.alive for agent in self._agents.values()):
            return None
        lost = ", ".join(f"{name} ({ending})" for name, ending in self._lost.items())
        return f"every node of this machine is lost: {lost}; look for the cause in their output"

    def _read_outcome(self) -> JobOutcome | None:
        try:
            entry = self._coordinator.get(outcome_key(self.run))
        except CoordinatorError as error:
            self._await_coordinator(error)
            return None
        self._heard_s, self._waits = time.monotonic(), False
        if entry is None:
            self._stay()
            return None
        self._over = True
        return decode(entry.key, entry.value, JobOutcome)

    def _await_coordinator(self, error: CoordinatorError) -> None:
        silent_s = time.monotonic() - self._heard_s
        if silent_s > self._patience_s:
            self.stop(f"the coordinator has been silent for {self._patience_s:g} s: {error}")
        elif silent_s > _REPORT_S and not self._waits:
            self._waits = True
            hint = "if its launcher was killed, start that again with the same --run-dir"
            if self._server or is_etcd(self._joint.place.url):
                hint = "the job goes on when it is back"
            _log.warning(
                "%s; waiting up to %g s for the coordinator: %s", error, self._patience_s, hint
            )

    def _decide(self, failure: str) -> None:
        """End the job if it ends with this launcher, else leave it: the others continue."""
        if self._server is not None:
            super()._decide(failure)
            return
        now_s = time.monotonic()
        if not self._leaving_s:
            self._leaving_s = now_s
            for agent in self._agents.values():
                agent.signal(signal.SIGTERM)
        late = now_s - self._leaving_s > self.config.notice.grace_s + _LEAVE_MARGIN_S
        if late or not any(agent.alive for agent in self._agents.values()):
            self.kill()

    # -- the end ---------------------------------------------------------------------------------

    def _end(self) -> None:
        with contextlib.suppress(CoordinatorError):
            if self._over:
                self._note_end()
        self._depart()
        with contextlib.suppress(CoordinatorError):
            if self._server is not None:
                self._let_others_leave()
        super()._end()

    def _note_end(self) -> None:
        entry = self._coordinator.get(self._joint.key)
        record = decode(entry.key, entry.value, SharedJobRecord) if entry else None
        if entry and record and record.run == self.run:
            ended = msgspec.structs.replace(record, ended=True)
            self._coordinator.compare_and_set(
                self._joint.key, encode(ended), expected=entry.revision
            )

    def _depart(self) -> None:
        if self._presence is None:
            return
        self._presence.close()
        with contextlib.suppress(CoordinatorError):
            self._coordinator.revoke(self._presence.lease)

    def _let_others_leave(self) -> None:
        """Keep serving until the other launchers have read the job's outcome."""
        deadline_s = time.monotonic() + _FAREWELL_S
        while not self._killed.is_set() and time.monotonic() < deadline_s:
            if not self._coordinator.range(self._joint.launchers)[0]:
                return
            time.sleep(_FAREWELL_POLL_S)

    def _forget_run(self) -> None:
        """Remove the run's keys once it has ended and the last launcher leaves."""
        with contextlib.suppress(CoordinatorError):
            if self._over and not self._coordinator.range(self._joint.launchers)[0]:
                super()._forget_run()


learn(globals())
