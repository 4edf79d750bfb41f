"""Requests to etcd, each with a deadline: to one member at a time, to another if it fails.

Each member has its own gRPC channel, instead of one over all addresses, because TLS checks the name
of the contacted member. A request that was certainly not done goes to the next member. If that is
unknown, the request is repeated only if a repetition changes nothing.

The members of an etcd that the job's launchers run change. Its clients ask for the list of members
now and then, and go on with those that are there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from holdfast.elastic.coordinator.etcd import reading
from holdfast.elastic.coordinator.etcd.address import EtcdAddress
from holdfast.elastic.coordinator.etcd.failures import Meaning, RequestFailure, advice, judge
from holdfast.elastic.coordinator.etcd.renewals import Renewals
from holdfast.elastic.coordinator.etcd.stubs import grpc, rpc
from holdfast.elastic.errors import ConfigError, CoordinatorError

_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_TOKEN_TRIES = 3
_LOOK_EVERY_S, _LOOK_S = 2.0, 0.5
_OPTIONS = (
    # etcd treats more than one ping in 5 s as an attack, and any ping without a call
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel makes a new connection
    ("grpc.enable_http_proxy", 0),
)

Metadata = tuple[tuple[str, str], ...]
_WITH_LEADER: Metadata = (("hasleader", "true"),)
"""Makes a member that lost its majority report that, instead of answering from old state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientIdentity:
    """A client's certificate, its key and its authority (PEM), and the name that servers have."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    server_name: str


class KnownMembers:
    """The members of one cluster, as some link of this process learned them last.

    All links share them: one that is idle, or that is made later from an old address, would find
    none of the members that it knows.
    """

    _all: ClassVar[dict[str, KnownMembers]] = {}
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.endpoints: tuple[str, ...] = ()
        self._look_at_s = 0.0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, token: str) -> KnownMembers:
        """Return those of the cluster with this token."""
        with cls._making:
            return cls._all.setdefault(token, cls())

    def due(self) -> bool:
        """Return whether to ask for them now; the others then need not."""
        with self._lock:
            now_s = time.monotonic()
            due = now_s >= self._look_at_s
            if due:
                self._look_at_s = now_s + _LOOK_EVERY_S
            return due


class RequestFailedError(CoordinatorError):
    """A request to etcd failed; ``failure`` says what is known of it."""

    def __init__(self, message: str, failure: RequestFailure) -> None:
        super().__init__(message)
        self.failure = failure


class Line:
    """A connection to one member; it is closed once retired and unused."""

    def __init__(self, endpoint: str, credentials: Any, *, server_name: str = "") -> None:
        self.endpoint = endpoint
        self._credentials, self._server_name = credentials, server_name
        self._channel = self._open(grpc)
        self._streams: Any = None
        self.kv, self.lease = rpc.KVStub(self._channel), rpc.LeaseStub(self._channel)
        self.auth = rpc.AuthStub(self._channel)
        self.cluster = rpc.ClusterStub(self._channel)
        self.maintenance = rpc.MaintenanceStub(self._channel)
        self.renewals = Renewals(self._renewing)
        self._lock = threading.Lock()
        self._users, self._retired, self._closed = 0, False, False

    def _open(self, kind: Any) -> Any:
        """Return a channel: one of ``grpc``, or an asynchronous one of ``grpc.aio``."""
        target = f"dns:///{self.endpoint}"
        options: tuple[tuple[str, Any], ...] = _OPTIONS
        if self._server_name:
            options = (*options, ("grpc.ssl_target_name_override", self._server_name))
        if self._credentials is None:
            return kind.insecure_channel(target, options=options)
        return kind.secure_channel(target, self._credentials, options=options)

    def watch(self, metadata: Metadata) -> Any:
        """Open an asynchronous stream of watches; only on the thread of `reading`.

        Raises ``asyncio.CancelledError`` if the line is closed.
        """
        return rpc.WatchStub(self._streaming()).Watch(metadata=metadata)

    def _renewing(self, metadata: Metadata) -> Any:
        return rpc.LeaseStub(self._streaming()).LeaseKeepAlive(metadata=metadata)

    def _streaming(self) -> Any:
        with self._lock:
            if self._closed:
                raise asyncio.CancelledError
            if self._streams is None:
                self._streams = self._open(grpc.aio)
            return self._streams

    def enter(self) -> bool:
        """Begin to use it; return False if it is retired."""
        with self._lock:
            self._users += not self._retired
            return not self._retired

    def leave(self) -> None:
        """Stop using it."""
        with self._lock:
            self._users -= 1
            last = self._retired and not self._users
        if last:
            self._close()

    def retire(self) -> None:
        """Allow no new use; its streams end."""
        with self._lock:
            last = not self._retired and not self._users
            self._retired = True
        if last:
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            streams, self._streams = self._streams, None
        self._channel.close()
        if streams is not None:
            reading.start(streams.close())


Ask = Callable[[Line, float, Metadata], Any]
"""Makes a request on a line, with a time limit in seconds and metadata, and returns the answer."""


class EtcdLink:
    """The connections to an etcd, shared by all threads. Raises ``ConfigError`` for bad files.

    With an ``identity`` the etcd is one of the job itself: its members change, and the link follows
    them.
    """

    def __init__(
        self, address: EtcdAddress, *, timeout_s: float, identity: ClientIdentity | None = None
    ) -> None:
        self.address, self.timeout_s = address, timeout_s
        self._server_name = identity.server_name if identity else ""
        self._credentials = credentials(address, identity) if address.secure else None
        self._password = _read(address.password).decode().strip() if address.password else ""
        self._lock = threading.Lock()
        self._endpoints = address.endpoints
        self._lines: dict[str, Line] = {}
        self._at = 0
        self._known = KnownMembers.of(address.token) if identity and address.token else None
        self._closed = False
        self._token: str | None = None
        self._token_lock = threading.RLock()

    def call(self, ask: Ask, *, repeatable: bool) -> Any:
        """Return the answer of any member that answers in time.

        ``repeatable``: the request may be done twice without harm. Raises ``RequestFailedError``.
        """
        return self._call(ask, repeatable=repeatable, metadata=self.metadata)

    def _call(self, ask: Ask, *, repeatable: bool, metadata: Callable[[], Metadata]) -> Any:
        deadline_s = time.monotonic() + self.timeout_s
        pause_s, refused_tokens = _PAUSE_S, 0
        while True:
            sent = metadata()
            line = self.enter()
            try:
                answer = ask(line, self._attempt_s(deadline_s, repeatable=repeatable), sent)
                self.look(line)
                return answer
            except grpc.RpcError as error:
                failure = judge(error.code().name, error.details() or "")
            finally:
                line.leave()
            self.note(line, failure, sent)
            if failure.meaning is Meaning.TOKEN and self.address.user:
                refused_tokens += 1
                again = refused_tokens < _TOKEN_TRIES
            else:
                again = failure.meaning is Meaning.NOT_DONE or (
                    failure.meaning is Meaning.LOST and repeatable
                )
            if not again or time.monotonic() + pause_s > deadline_s:
                raise self.error(failure)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _attempt_s(self, deadline_s: float, *, repeatable: bool) -> float:
        """Return the time limit of one attempt.

        Leaves time for a second member if that is allowed.
        """
        left_s = max(deadline_s - time.monotonic(), _PAUSE_S)
        several = repeatable and len(self._endpoints) > 1
        return min(left_s, self.timeout_s / 2) if several else left_s

    def enter(self) -> Line:
        """Return the line to the member in use; `Line.leave` it afterwards."""
        if self._known is not None:
            self._go_to(self._known.endpoints)
        while True:
            with self._lock:
                if self._closed:
                    raise CoordinatorError(f"{self.address}: this connection is closed")
                endpoint = self._endpoints[self._at]
                line = self._lines.get(endpoint)
                if line is None:
                    line = Line(endpoint, self._credentials, server_name=self._server_name)
                    self._lines[endpoint] = line
            if line.enter():
                return line

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The members that it goes to, in turn."""
        with self._lock:
            return self._endpoints

    def look(self, line: Line) -> None:
        """Ask the member that just answered who the members are, now and then."""
        if self._known is None or not self._known.due():
            return
        try:
            found = line.cluster.MemberList(
                rpc.MemberListRequest(), timeout=_LOOK_S, metadata=_WITH_LEADER
            )
        except grpc.RpcError:
            return  # the next request finds out
        voters = [member for member in found.members if not member.isLearner]
        self.follow(sorted(url.rpartition("/")[2] for each in voters for url in each.clientURLs))

    def follow(self, endpoints: Sequence[str]) -> None:
        """Go to these members from now on, as all links of this process; none are ignored."""
        if self._known is not None and endpoints:
            self._known.endpoints = tuple(endpoints)
        self._go_to(endpoints)

    def _go_to(self, endpoints: Sequence[str]) -> None:
        """Use these members; streams to others end."""
        with self._lock:
            if not endpoints or self._closed or set(endpoints) == set(self._endpoints):
                return
            used = self._endpoints[self._at]
            self._endpoints = tuple(endpoints)
            self._at = self._endpoints.index(used) if used in self._endpoints else 0
            gone = [self._lines.pop(each) for each in [*self._lines] if each not in endpoints]
        for line in gone:
            line.retire()

    def note(self, line: Line, failure: RequestFailure, metadata: Metadata) -> None:
        """Update token and connections after a failed request, for the next requests."""
        if failure.meaning is Meaning.TOKEN:
            self.forget_token(metadata)
        if not failure.member_fails:
            return
        with self._lock:
            used = self._endpoints[self._at]
            if self._lines.get(used) is not line:
                return  # another thread has done so
            if failure.connection_fails:
                del self._lines[used]
            self._at = (self._at + 1) % len(self._endpoints)
        if failure.connection_fails:
            line.retire()

    def error(self, failure: RequestFailure) -> RequestFailedError:
        """Return the error to raise for a failure."""
        found = "refuses" if failure.meaning is Meaning.REFUSED else "does not answer"
        text = f"{failure.code}: {failure.text}"
        return RequestFailedError(
            f"{self.address} {found}: {text}; {advice(failure.text)}", failure
        )

    # -- the client's identity -------------------------------------------------------------------

    def metadata(self) -> Metadata:
        """Return the metadata of every request; request a token if one is missing."""
        if not self.address.user:
            return _WITH_LEADER
        with self._token_lock:
            if self._token is None:
                self._token = self._authenticate()
            return (*_WITH_LEADER, ("token", self._token)) if self._token else _WITH_LEADER

    def forget_token(self, metadata: Metadata) -> None:
        """Request a token next time, unless there is a newer one than in ``metadata``."""
        with self._token_lock:
            if not self._token or ("token", self._token) in metadata:
                self._token = None

    def _authenticate(self) -> str:
        request = rpc.AuthenticateRequest(name=self.address.user, password=self._password)

        def ask(line: Line, timeout_s: float, metadata: Metadata) -> Any:
            return line.auth.Authenticate(request, timeout=timeout_s, metadata=metadata)

        try:
            answer = self._call(ask, repeatable=True, metadata=lambda: _WITH_LEADER)
        except RequestFailedError as error:
            if "authentication is not enabled" in error.failure.text:
                return ""
            raise
        return str(answer.token)

    def close(self) -> None:
        """Close every connection; pending requests fail."""
        with self._lock:
            self._closed = True
            lines = [*self._lines.values()]
            self._lines = {}
        for line in lines:
            line.retire()


def credentials(address: EtcdAddress, identity: ClientIdentity | None) -> Any:
    """Return gRPC's credentials for a client. Raises ``ConfigError`` for bad files."""
    if identity is not None:
        return grpc.ssl_channel_credentials(
            root_certificates=identity.ca,
            private_key=identity.key,
            certificate_chain=identity.certificate,
        )
    files = (address.ca, address.key, address.cert)
    ca, key, cert = (_read(file) if file else None for file in files)
    return grpc.ssl_channel_credentials(
        root_certificates=ca, private_key=key, certificate_chain=cert
    )


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; the address of etcd needs this file on every node"
        ) from error
