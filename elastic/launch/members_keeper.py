"""A launcher's part in a managed etcd: its own member, and in turn the changes of the members.

Each launcher looks at the list of members every second. It starts the member that the list names
for its machine, starts it again if it ended, and removes its data once the list no longer names it.
The launcher that holds a leased key also asks the members for signs of life and makes the next
change (`holdfast.elastic.decisions.etcd_members`), one at a time. There is nothing to agree on
beside: the list of members is etcd's own.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.private import make_private
from holdfast.ckpt.transport import RunKey
from holdfast.ckpt.types import learn
from holdfast.elastic.addresses import own_addresses
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.etcd.address import MANAGED, EtcdAddress
from holdfast.elastic.coordinator.managed.authority import Authority
from holdfast.elastic.coordinator.managed.cluster import MembersAdmin, new_token
from holdfast.elastic.coordinator.managed.command import DATA, FOLDER, MemberAddress, member_command
from holdfast.elastic.coordinator.managed.listed import ListedMember
from holdfast.elastic.decisions.etcd_members import (
    AddLearner,
    MemberPlace,
    MemberState,
    PromoteLearner,
    RemoveMember,
    next_change,
)
from holdfast.elastic.decisions.own_member import OwnMember, OwnStep, own_step
from holdfast.elastic.decisions.restarting import pause_s
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError
from holdfast.elastic.launch.member_process import MemberProcess
from holdfast.elastic.launch.member_service import (
    MemberRecord,
    MemberServiceConfig,
    read_member,
    write_member,
)
from holdfast.elastic.membership.view import decode
from holdfast.elastic.processes.log_files import last_words

_EVERY_S = 1.0
_CALL_S = 2.0
_LEASE_S = 10.0
_LEAST_SILENCE_S = 0.001
_JOIN_S = 20.0
_LOG: Final = "etcd.log"
_log = logging.getLogger(__name__)


class LauncherPresence(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher of a job, as the others see it under its lease.

    ``host`` is the address of the etcd member that it can run; empty: it runs none.
    """

    host: str = ""
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperConfig:
    """The settings of a keeper: the etcd program, the places of files, the job and its keys.

    A member that its launcher left without a successor for ``return_s`` ends.
    """

    program: Path
    run_dir: Path
    place: MemberAddress
    job: str
    launchers: str
    return_s: float

    @property
    def folder(self) -> Path:
        """The folder of the member."""
        return self.run_dir.absolute() / FOLDER

    @property
    def log(self) -> Path:
        """The log of the member."""
        return self.run_dir.absolute() / "logs" / _LOG


class MembersKeeper:
    """Keeps the member of this machine, and in turn the list of members, on its own thread."""

    def __init__(self, config: KeeperConfig, key: RunKey) -> None:
        self.config, self._key = config, key
        self._authority = Authority.of(key)
        self.token = ""
        self._record: MemberRecord | None = None
        self._process: MemberProcess | None = None
        self._starts, self._due_s = 0, 0.0
        self._heard_s: dict[int, float] = {}
        self._lease: int | None = None
        self._leaving = False
        self.handed_over = threading.Event()
        """Set once this machine has no member, or nobody is there to take its place."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd-members", daemon=True)

    # -- the beginning ---------------------------------------------------------------------------

    def take_up(self) -> bool:
        """Continue with the member whose data is in the run directory; False if there is none.

        The data of another job, key or address is removed.
        """
        folder, ours = self.config.folder, (self.config.job, self._authority.name)
        record = read_member(folder)
        if record is None:
            shutil.rmtree(folder, ignore_errors=True)
            return False
        found = MemberProcess.found(folder, token=record.token)
        same = (record.job, record.authority) == ours
        whole = found is not None or self._has_data()
        if not same or not whole or record.endpoint != self.config.place.endpoint:
            if found:
                found.close()
            shutil.rmtree(folder, ignore_errors=True)
            return False
        self._record, self._process, self.token = record, found, record.token
        if found is None:
            self._start_again()
        return True

    def begin(self) -> None:
        """Begin a cluster of one member. Raises ``CoordinatorError`` if it does not start."""
        self.token = new_token()
        self._start_new(None, id=0)

    def follow(self, token: str) -> None:
        """Follow the cluster that others began."""
        self.token = token

    def start(self, endpoints: tuple[str, ...]) -> None:
        """Begin to keep the members; ``endpoints`` are those of some."""
        address = EtcdAddress.parse(f"{MANAGED}://{','.join(endpoints)}/{self.token}")
        self._admin = MembersAdmin(address, self._authority.client(self.token), timeout_s=_CALL_S)
        self._coordinator = connect(self.address, self._key, timeout_s=_CALL_S)
        self._thread.start()

    @property
    def known(self) -> tuple[str, ...]:
        """The members that the run directory names, for clients."""
        record = self._record
        return tuple(dict.fromkeys((record.endpoint, *record.endpoints))) if record else ()

    @property
    def address(self) -> str:
        """The address of the cluster with the members that are known now."""
        return f"{MANAGED}://{','.join(self._admin.endpoints)}/{self.token}"

    def ending(self) -> str:
        """Return the last words of this machine's member, empty while it runs."""
        if self._process is None or self._process.alive:
            return ""
        return last_words(self.config.log) or "it said nothing"

    # -- the end ---------------------------------------------------------------------------------

    def leave(self) -> None:
        """Do nothing more to get a member; `handed_over` tells when the others have taken over."""
        self._leaving = True

    def close(self, *, forget: bool = True) -> None:
        """Stop, and end the member of this machine; its data stays unless ``forget``."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
            with contextlib.suppress(CoordinatorError):
                if self._lease is not None:
                    self._coordinator.revoke(self._lease)
            self._coordinator.close()
            self._admin.close()
        if self._process is not None:
            self._process.kill(orderly=forget)
            self._process = None
        if forget:
            shutil.rmtree(self.config.folder, ignore_errors=True)

    # -- on the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            try:
                self._turn()
            except CoordinatorError as error:
                _log.debug("the members of etcd: %s", error)
            except OSError as error:
                _log.warning("the etcd member of this machine: %s", error)

    def _turn(self) -> None:
        listed: list[ListedMember] | None = None
        try:
            listed = self._admin.members()
        finally:
            self._keep_own(listed)
        self._note(listed)
        places = self._places()
        staying = [place for place in places if not place.leaving]
        if self._leaving and (self._record is None or not staying):
            self.handed_over.set()
        if self._has_turn():
            self._change(listed, places)
        else:
            self._heard_s.clear()

    def _keep_own(self, listed: list[ListedMember] | None) -> None:
        record, process = self._record, self._process
        runs = process is not None and process.alive
        there = record is not None and (runs or self._has_data())
        own = OwnMember(id=record.id, runs=runs) if record and there else None
        step, reason = own_step(own, listed, peer=self.config.place.peer)
        due = time.monotonic() >= self._due_s
        if step is not OwnStep.KEEP and due:
            _log.info("etcd: %s: %s", step.value, reason)
        match step:
            case OwnStep.DISCARD:
                self._discard()
            case OwnStep.AGAIN if due:
                self._start_again()
            case OwnStep.BEGIN if listed is not None and due and not self._leaving:
                fresh = next(each for each in listed if each.peer == self.config.place.peer)
                others = {each.name: each.peer for each in listed if each.name}
                self._start_new(others, id=fresh.id)

    def _note(self, listed: list[ListedMember]) -> None:
        """Write down what a later launcher needs to find the cluster again."""
        if self._record is None:
            return
        mine = [each.id for each in listed if each.peer == self.config.place.peer]
        clients = tuple(each.client for each in listed if each.client)
        noted = msgspec.structs.replace(
            self._record, id=self._record.id or (mine[0] if mine else 0), endpoints=clients
        )
        if noted != self._record:
            write_member(self.config.folder, noted)
            self._record = noted
        if self._process is not None and self._starts and time.monotonic() > self._due_s:
            self._starts = 0

    # -- the member of this machine --------------------------------------------------------------

    def _start_new(self, others: dict[str, str] | None, *, id: int) -> None:
        """Start a member with empty data; ``others`` are the peers by name, None for none."""
        folder, place = self.config.folder, self.config.place
        shutil.rmtree(folder, ignore_errors=True)
        make_private(folder)
        record = MemberRecord(
            job=self.config.job,
            authority=self._authority.name,
            token=self.token,
            id=id,
            endpoint=place.endpoint,
        )
        write_member(folder, record)
        self._record = record
        self._launch(others)

    def _start_again(self) -> None:
        """Start the member with its data; the list of members is in there."""
        self._launch({})

    def _launch(self, others: dict[str, str] | None) -> None:
        folder, place = self.config.folder, self.config.place
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._starts += 1
        self._due_s = time.monotonic() + max(_EVERY_S, pause_s(self._starts))
        hosts = dict.fromkeys((place.host, place.listen, *own_addresses()))
        self._authority.write_member(folder, token=self.token, hosts=[*hosts])
        config = MemberServiceConfig(
            folder=str(folder),
            argv=member_command(
                self.config.program, place, folder, token=self.token, others=others
            ),
            log=str(self.config.log),
            return_s=self.config.return_s,
        )
        self._process = MemberProcess.start(config, token=self.token)

    def _has_data(self) -> bool:
        """Return whether the member's log was begun; etcd makes it visible when it is whole."""
        return (self.config.folder / DATA / "member" / "wal").is_dir()

    def _discard(self) -> None:
        if self._process is not None:
            self._process.close()
        shutil.rmtree(self.config.folder, ignore_errors=True)
        self._process, self._record, self._starts = None, None, 0

    # -- the list of members ---------------------------------------------------------------------

    def _places(self) -> list[MemberPlace]:
        entries, _ = self._coordinator.range(self.config.launchers)
        there = [decode(each.key, each.value, LauncherPresence) for each in entries]
        return [MemberPlace(machine=each.host, leaving=each.leaving) for each in there if each.host]

    def _has_turn(self) -> bool:
        """Return whether this launcher is the one that changes the members now."""
        key = f"jobs/{self.config.job}/members"
        try:
            if self._lease is None:
                self._lease = self._coordinator.grant(_LEASE_S)
            else:
                self._coordinator.keep_alive(self._lease)
            entry = self._coordinator.get(key)
            if entry is not None:
                return entry.lease == self._lease
            return self._coordinator.compare_and_set(
                key, self.config.place.host, expected=0, lease=self._lease
            )
        except LeaseExpiredError:
            self._lease = None
            return False

    def _change(self, listed: list[ListedMember], places: list[MemberPlace]) -> None:
        change, reason = next_change([self._state(each) for each in listed], places)
        self._heard_s = {each.id: self._heard_s[each.id] for each in listed}
        match change:
            case AddLearner(machine=machine):
                _log.info("etcd: a member at %s: %s", machine, reason)
                self._admin.add_learner(f"{machine}:{self.config.place.port + 1}")
            case PromoteLearner(id=id):
                self._admin.promote(id)
            case RemoveMember(id=id):
                (gone,) = (each for each in listed if each.id == id)
                _log.warning("etcd goes on without its member at %s: %s", gone.machine, reason)
                self._admin.remove(id)

    def _state(self, member: ListedMember) -> MemberState:
        """Ask a member for a sign of life."""
        now_s = time.monotonic()
        heard_s = self._heard_s.setdefault(member.id, now_s)
        silent_s = max(now_s - heard_s, _LEAST_SILENCE_S)
        if self._admin.answers(member):
            self._heard_s[member.id], silent_s = time.monotonic(), 0.0
        return MemberState(
            id=member.id,
            machine=member.machine,
            learner=member.learner,
            silent_s=silent_s,
        )


learn(globals())
