"""A node's link to a rendezvous: its lease, its own record, and the records of all nodes.

With the embedded coordinator one of the nodes on the endpoint's machine serves it. When that node
ends, another of the same machine takes over with an empty table. Every node then writes its record
again; the newest round is the one with the highest number that any node remembers.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.addresses import checked_host
from holdfast.elastic.agent.watch import KeyWatch, WatchedKeys
from holdfast.elastic.coordinator.base import Coordinator, Entry, KeyEvent
from holdfast.elastic.coordinator.connecting import connect, is_etcd, is_managed
from holdfast.elastic.coordinator.embedded import EmbeddedServer
from holdfast.elastic.coordinator.etcd.address import EtcdAddress
from holdfast.elastic.errors import ConfigError, CoordinatorError, LeaseExpiredError
from holdfast.elastic.membership.view import encode
from holdfast.elastic.rendezvous.rounds import CLOSED, NODES, ROUND, Participant, Round, RoundView

_log = logging.getLogger(__name__)

DEFAULT_PORT = 29400
_RENEWALS = 4
_RETRY_S = 0.2
_CALL_S = 2.0
_FAREWELL_S = 5.0
_FAREWELL_POLL_S = 0.02
_CLOSED_TTL_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorPlace:
    """The coordinator's place: an etcd's URL, or ``host:port`` of the embedded one.

    ``may_host``: whether this node may serve it, or begin the etcd that the job runs itself; None:
    only if the host is this machine.
    """

    address: str
    may_host: bool | None = None

    @classmethod
    def parse(cls, endpoint: str, *, may_host: bool | None = None) -> CoordinatorPlace:
        """Return the place for a launcher's ``HOST[:PORT]`` or etcd URL. Raises ``ConfigError``."""
        if is_etcd(endpoint):
            EtcdAddress.parse(endpoint)  # raises an error that names the fault
            return cls(address=endpoint, may_host=may_host if is_managed(endpoint) else False)
        host, colon, port = (endpoint or "localhost").rpartition(":")
        if endpoint.endswith("]") or endpoint.count(":") > 1:
            checked_host(endpoint, given="endpoint")
        if not colon:
            host, port = port, str(DEFAULT_PORT)
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"endpoint {endpoint!r}: write HOST:PORT, or etcd://HOST:PORT")
        checked_host(host, given="endpoint")
        return cls(address=f"{host}:{port}", may_host=may_host)

    @property
    def host(self) -> str:
        """A host of the coordinator."""
        if is_etcd(self.address):
            return EtcdAddress.parse(self.address).endpoints[0].rpartition(":")[0]
        return self.address.rpartition(":")[0]

    @property
    def url(self) -> str:
        """The address for `connect`."""
        return self.address if is_etcd(self.address) else f"tcp://{self.address}"

    def bind(self) -> str:
        """Return the address at which this node would serve it, empty if it may not."""
        if self.may_host is False or is_etcd(self.address):
            return ""
        port = self.address.rpartition(":")[2]
        if self.may_host:
            return f"tcp://0.0.0.0:{port}"
        address = own_address(self.host)
        return f"tcp://{address}:{port}" if address else ""


def own_address(host: str) -> str:
    """Return the IPv4 address of ``host`` if it belongs to this machine, else ""."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        address = socket.gethostbyname(host)
        probe.bind((address, 0))
        return address
    return ""


def is_free(bind: str) -> bool:
    """Return whether no process of this machine listens at ``bind``, ``tcp://ADDRESS:PORT``."""
    address, _, port = bind.removeprefix("tcp://").rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, int(port)))
        except OSError:
            return False
    return True


def address_towards(host: str) -> str:
    """Return this machine's address on the route to ``host``, at which others find it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, DEFAULT_PORT))  # on a datagram socket: only looks up the route
        return str(probe.getsockname()[0])
    return socket.gethostname()


class RendezvousLink:
    """A node's membership in one rendezvous, kept alive on a thread of its own until `leave`."""

    def __init__(self, place: CoordinatorPlace, key: RunKey, *, prefix: str, ttl_s: float) -> None:
        self._place, self._key, self._prefix, self._ttl_s = place, key, prefix, ttl_s
        self._server: EmbeddedServer | None = None
        self._coordinator: Coordinator | None = None
        self._watch: KeyWatch | None = None
        self._mirror = WatchedKeys()
        self._version = 0
        self._changed = threading.Condition()
        self._calling = threading.RLock()
        self._lease: int | None = None
        self._said: Participant | None = None
        self._known: Round | None = None
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="rendezvous-lease", daemon=True)

    def enter(self, participant: Participant, *, deadline_s: float) -> None:
        """Publish this node's record and keep it published; tries until ``deadline_s`` (monotonic).

        Raises ``CoordinatorError`` if no node serves the coordinator by then.
        """
        self._said = participant
        self._host()
        logged = False
        while True:
            try:
                self._register()
                break
            except CoordinatorError as error:
                if time.monotonic() > deadline_s:
                    raise CoordinatorError(
                        f"{error}; check that the endpoint's node is up and that all nodes have "
                        "the same key file"
                    ) from error
                if not logged:
                    _log.warning("waiting for the coordinator: %s", error)
                logged = True
            self._ended.wait(_RETRY_S)
        self._keeper.start()

    @property
    def entered(self) -> bool:
        """True if `enter` has succeeded."""
        return self._keeper.ident is not None

    def say(self, participant: Participant) -> None:
        """Replace this node's record. If it raises ``CoordinatorError``, it is published later."""
        with self._calling:
            self._said = participant
            self._publish()

    def view(self) -> RoundView:
        """Return the rendezvous as last received.

        Raises ``CoordinatorError`` for corrupt records.
        """
        with self._changed:
            entries = list(self._mirror.entries.values())
        view = RoundView.from_entries(entries, prefix=self._prefix)
        known = self._known
        if view.newest and (known is None or view.number >= known.number):
            self._known = view.newest
        return view

    @property
    def version(self) -> int:
        """A number that grows with every change; read before `view`, for `await_change`."""
        return self._version

    def await_change(self, *, after: int, timeout_s: float) -> None:
        """Return when ``version`` exceeds ``after``, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > after, timeout_s)

    def form(self, fresh: Round, *, expected: int) -> bool:
        """Append a round; False if another node was faster. Raises ``CoordinatorError``."""
        with self._calling:
            return self._connected().compare_and_set(
                self._prefix + ROUND, encode(fresh), expected=expected
            )

    def close(self) -> None:
        """Prevent further rounds. The mark expires by itself minutes after the end."""
        with self._calling:
            coordinator = self._connected()
            lease = coordinator.grant(_CLOSED_TTL_S)
            coordinator.put(self._prefix + CLOSED, "{}", lease=lease)

    def leave(self, *, farewell: bool) -> None:
        """Revoke the lease at once and stop serving; may be repeated.

        ``farewell`` lets the other nodes of a closed rendezvous leave before their coordinator
        ends; the last of them removes the remaining keys.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        with self._calling, contextlib.suppress(CoordinatorError):
            if self._coordinator and self._lease is not None:
                self._coordinator.revoke(self._lease)
            if farewell and self._coordinator:
                self._say_goodbye(self._coordinator)
        if self._watch:
            self._watch.close()
        if self._coordinator:
            self._coordinator.close()
        if self._server:
            self._server.close()

    def _say_goodbye(self, coordinator: Coordinator) -> None:
        deadline_s = time.monotonic() + (_FAREWELL_S if self._server else 0.0)
        while True:
            others, _ = coordinator.range(self._prefix + NODES)
            if not others:
                coordinator.delete(self._prefix + ROUND)
                return
            if time.monotonic() >= deadline_s:
                return
            time.sleep(_FAREWELL_POLL_S)

    def _keep(self) -> None:
        while not self._ended.wait(self._ttl_s / _RENEWALS):
            try:
                self._renew()
            except CoordinatorError as error:
                _log.debug("the rendezvous cannot be reached: %s", error)

    def _renew(self) -> None:
        """Renew the lease.

        Register again if it has ended, or if the table was lost with its host.
        """
        with self._calling:
            if self._ended.is_set() or self._said is None:
                return
            try:
                coordinator = self._connected()
                if self._lease is None:
                    raise LeaseExpiredError("there is no lease")
                coordinator.keep_alive(self._lease)
                if coordinator.get(self._key_of(self._said)) is None:
                    raise LeaseExpiredError("the table was lost")  # its number may be reused
            except LeaseExpiredError:
                self._lease = None
                self._register()
            except CoordinatorError:
                if not self._host():
                    raise
                self._lease = None
                self._register()

    def _register(self) -> None:
        with self._calling:
            try:
                self._take_lease()
            except CoordinatorError:
                if not self._host():
                    raise
                self._take_lease()
            self._remind()
            self._publish()
            if self._watch:
                self._watch.close()
            self._watch = KeyWatch(
                connect(self._place.url, self._key, timeout_s=_CALL_S),
                self._prefix,
                start=self._on_entries,
                change=self._on_changes,
            )

    def _take_lease(self) -> None:
        self._lease = self._connected().grant(self._ttl_s)

    def _connected(self) -> Coordinator:
        if self._coordinator is None:
            self._coordinator = connect(self._place.url, self._key, timeout_s=_CALL_S)
        return self._coordinator

    def _host(self) -> bool:
        """Serve the coordinator if this is its machine and no node does.

        Return whether this one does. If another node serves it, the port is taken.
        """
        if self._server is not None or not (bind := self._place.bind()):
            return False
        try:
            self._server = EmbeddedServer(self._key, bind=bind)
        except CoordinatorError:
            return False
        _log.info("serving the rendezvous at %s", bind)
        return True

    def _remind(self) -> None:
        """Write the newest round again if the table was lost."""
        known = self._known
        if known is None:
            return
        coordinator = self._connected()
        entry = coordinator.get(self._prefix + ROUND)
        there = RoundView.from_entries([entry], prefix=self._prefix) if entry else RoundView()
        if there.number < known.number:
            coordinator.compare_and_set(
                self._prefix + ROUND, encode(known), expected=there.revision
            )

    def _publish(self) -> None:
        if self._said is None:
            return
        try:
            self._connected().put(self._key_of(self._said), encode(self._said), lease=self._lease)
        except LeaseExpiredError as error:  # the keeper publishes it under a new one soon
            raise CoordinatorError(str(error)) from error

    def _key_of(self, participant: Participant) -> str:
        return f"{self._prefix}{NODES}{participant.node}"

    def _on_entries(self, entries: Sequence[Entry]) -> None:
        with self._changed:
            self._mirror.reset(entries)
            self._version += 1
            self._changed.notify_all()

    def _on_changes(self, events: Sequence[KeyEvent]) -> None:
        with self._changed:
            self._mirror.apply(events)
            self._version += 1
            self._changed.notify_all()
