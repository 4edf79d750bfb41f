"""``torchrun --rdzv-backend=holdfast``: torch's rendezvous on Holdfast's coordinator.

``--rdzv-endpoint`` is ``HOST:PORT``, where a node on HOST serves the embedded coordinator, or the
URL of an etcd (v3). Every node holds a lease, so the loss of a node is detected within seconds, and
the survivors meet again at once if they are enough. ``--rdzv-conf`` takes ``join_timeout``,
``last_call_timeout`` and ``read_timeout`` like torch's own backends, and also ``settle``,
``lease_ttl`` (seconds), ``key_file`` and ``is_host``.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from holdfast.ckpt.torch_private import PrefixStore, TCPStore
from holdfast.elastic.addresses import checked_host
from holdfast.elastic.channel.shared_key import shared_key, shared_key_file
from holdfast.elastic.coordinator.connecting import is_managed
from holdfast.elastic.errors import ConfigError, CoordinatorError
from holdfast.elastic.rendezvous.link import CoordinatorPlace, RendezvousLink, address_towards
from holdfast.elastic.rendezvous.rounds import (
    Closed,
    Enter,
    Form,
    Participant,
    Round,
    RoundLimits,
    WaitForNodes,
    decide,
    to_restart_for,
    waiting,
)

_log = logging.getLogger(__name__)

BACKEND: Final = "holdfast"
_LOOK_S = 1.0
_FORM_S = 0.1
_MEET_S = 30.0
_BACKLOG = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousPatience:
    """A node's waiting times, in seconds: to join a round, and for an answer of the round's store.

    A node that is silent for ``lease_s`` counts as lost.
    """

    join_s: float = 600.0
    read_s: float = 60.0
    lease_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("join_s", "read_s", "lease_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a positive number")


class HoldfastRendezvous(RendezvousHandler):
    """One node's rendezvous; its methods are called by torchrun's agent, on one thread."""

    def __init__(
        self,
        link: RendezvousLink,
        *,
        run_id: str,
        host: str,
        limits: RoundLimits,
        patience: RendezvousPatience,
    ):
        self._link, self._run_id, self._host = link, run_id, host
        self._limits, self._patience = limits, patience
        self._node = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._round: Round | None = None
        self._store: TCPStore | None = None
        self._met: TCPStore | None = None
        self._closed = False
        atexit.register(link.leave, farewell=False)

    def get_backend(self) -> str:
        """Return ``"holdfast"``."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return torchrun's ``--rdzv-id``."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Always True: workers meet at the store of this round, which their agents serve."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a round that includes this node, and return its store, rank and size.

        The workers of the previous round must have ended. Raises ``RendezvousClosedError``,
        ``RendezvousGracefulExitError`` (closed, and this node was a spare),
        ``RendezvousTimeoutError`` and ``RendezvousConnectionError``.
        """
        deadline_s = time.monotonic() + self._patience.join_s
        after = self._round.number if self._round else 0
        while True:
            self._wait_anew(after, deadline_s=deadline_s)
            found = self._await_round(after, deadline_s=deadline_s)
            if info := self._meet(found):
                return info
            after = found.round.number

    def is_closed(self) -> bool:
        """Return whether no further round will begin, as last received."""
        self._closed = self._closed or self._link.view().closed
        return self._closed

    def set_closed(self) -> None:
        """Prevent further rounds. Raises ``RendezvousConnectionError``."""
        self._closed = True
        try:
            self._link.close()
        except CoordinatorError as error:
            raise RendezvousConnectionError(str(error)) from error

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes for which the present round should end; makes no request.

        These are waiting nodes and lost nodes: so the survivors need not wait for a collective to
        fail. While the coordinator is unreachable, the answer is the last known one, and training
        continues.
        """
        if self._round is None or self.is_closed():
            return 0
        because = to_restart_for(
            self._link.view(), node=self._node, inside=self._round, limits=self._limits
        )
        if because:
            _log.info("round %d ends because of %s", self._round.number, ", ".join(because))
        return len(because)

    def shutdown(self) -> bool:
        """Close the rendezvous and leave; return False if the others could not be informed."""
        try:
            self.set_closed()
        except RendezvousConnectionError as error:
            _log.warning("rendezvous %s was not closed: %s", self._run_id, error)
        self._link.leave(farewell=True)
        return self._closed

    def _wait_anew(self, after: int, *, deadline_s: float) -> None:
        """Announce that this node waits, with a new store that could serve the next round."""
        self._store = serve_at(self._host, read_s=self._patience.read_s)
        participant = Participant(
            node=self._node,
            host=self._host,
            store=f"{self._host}:{self._store.port}",
            waits_after=after,
        )
        try:
            if self._link.entered:
                self._say(participant)
            else:
                self._link.enter(participant, deadline_s=deadline_s)
        except CoordinatorError as error:
            raise RendezvousConnectionError(str(error)) from error

    def _say(self, participant: Participant) -> None:
        try:
            self._link.say(participant)
        except CoordinatorError as error:
            _log.info("the node will register when the coordinator is back: %s", error)

    def _await_round(self, after: int, *, deadline_s: float) -> Enter:
        ready: tuple[str, ...] = ()
        changed_s, why = time.monotonic(), ""
        while True:
            now_s, seen = time.monotonic(), self._link.version
            view = self._link.view()
            if waiting(view) != ready:
                ready, changed_s = waiting(view), now_s
            decision, reason = decide(
                view,
                node=self._node,
                after=after,
                limits=self._limits,
                settled_s=now_s - changed_s,
            )
            if reason != why:
                why = reason
                _log.info("rendezvous %s: %s", self._run_id, reason)
            match decision:
                case Enter():
                    return decision
                case Closed(needed=needed):
                    self._closed = True
                    raise _closed(self._run_id, needed=needed)
                case Form(round=formed, expected=expected):
                    self._form(formed, expected=expected)
                    self._pause(_FORM_S, after=seen, deadline_s=deadline_s, why=reason)
                case WaitForNodes(seconds=seconds):
                    wait_s = min(_LOOK_S, seconds or _LOOK_S)
                    self._pause(wait_s, after=seen, deadline_s=deadline_s, why=reason)

    def _form(self, formed: Round, *, expected: int) -> None:
        """Try to form a round.

        The next view shows whether this or another node's round was formed.
        """
        try:
            self._link.form(formed, expected=expected)
        except CoordinatorError as error:
            _log.info("no round can be formed now: %s", error)

    def _pause(self, seconds: float, *, after: int, deadline_s: float, why: str) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise RendezvousTimeoutError(
                f"rendezvous {self._run_id} did not complete within {self._patience.join_s:g} s: "
                f"{why}; start more nodes, lower --nnodes, or give more time with "
                "--rdzv-conf join_timeout=SECONDS"
            )
        self._link.await_change(after=after, timeout_s=min(seconds, left_s))

    def _meet(self, found: Enter) -> RendezvousInfo | None:
        """Connect to the round's store; None if the node that serves it is gone already."""
        formed = found.round
        host, _, port = formed.store.rpartition(":")
        if found.rank == 0:
            store: TCPStore | None = self._store
        else:
            store = _connect(host, int(port), read_s=self._patience.read_s)
        if store is None:
            _log.info("round %d: no process serves its store at %s", formed.number, formed.store)
            return None
        self._round, self._met = formed, store
        record = Participant(node=self._node, host=self._host, store=formed.store, waits_after=None)
        self._say(record)
        return RendezvousInfo(
            PrefixStore(f"{BACKEND}/{self._run_id}/{formed.number}", store),
            found.rank,
            len(formed.members),
            RendezvousStoreInfo(master_addr=host, master_port=int(port)),
        )


def serve_at(host: str, *, read_s: float) -> TCPStore:
    """Serve a store for a round at this address alone; left to itself, torch takes all addresses.

    Raises ``RendezvousConnectionError``.
    """
    try:
        with socket.create_server((host, 0), backlog=_BACKLOG) as listening:
            port = listening.getsockname()[1]
            return TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=read_s),
                master_listen_fd=listening.detach(),  # the store closes it
            )
    except OSError as error:
        raise RendezvousConnectionError(
            f"this node cannot listen at {host} ({error}): give an address of its own with "
            "--local-addr"
        ) from error


def _connect(host: str, port: int, *, read_s: float) -> TCPStore | None:
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_MEET_S))
    except RuntimeError:  # the type of all of torch's connection errors
        return None
    store.set_timeout(timedelta(seconds=read_s))
    return store


def _closed(run_id: str, *, needed: bool) -> Exception:
    if needed:
        return RendezvousClosedError(f"rendezvous {run_id} was closed by another of its nodes")
    return RendezvousGracefulExitError(
        f"rendezvous {run_id} was closed; this node had been waiting as a spare"
    )


def create_handler(params: RendezvousParameters) -> HoldfastRendezvous:
    """Return the handler for torchrun's parameters; see the module for ``config``."""
    if is_managed(params.endpoint):
        raise ConfigError(
            f"endpoint {params.endpoint}: only `holdfast run` runs an etcd of its own; write "
            "HOST:PORT, or etcd://HOST:PORT"
        )
    place = CoordinatorPlace.parse(params.endpoint, may_host=params.get_as_bool("is_host"))
    patience = RendezvousPatience(
        **_seconds(params, join_s="join_timeout", read_s="read_timeout", lease_s="lease_ttl")
    )
    limits = RoundLimits(
        least=params.min_nodes,
        most=params.max_nodes,
        **_seconds(params, last_call_s="last_call_timeout", settle_s="settle"),
    )
    given = params.get("key_file")
    key = shared_key(shared_key_file(Path(given) if given else None))
    link = RendezvousLink(place, key, prefix=f"torchrun/{params.run_id}/", ttl_s=patience.lease_s)
    given_host = params.local_addr and checked_host(params.local_addr, given="--local-addr")
    host = given_host or address_towards(place.host)
    return HoldfastRendezvous(
        link, run_id=params.run_id, host=host, limits=limits, patience=patience
    )


def _seconds(params: RendezvousParameters, **names: str) -> dict[str, float]:
    """Return the durations given in ``--rdzv-conf``, by the names of their fields."""
    found = {}
    for field, name in names.items():
        if (value := params.get(name)) is None:
            continue
        try:
            found[field] = float(value)
        except ValueError:
            raise ConfigError(f"--rdzv-conf {name}={value}: give seconds") from None
    return found


def torchrun_handler() -> RendezvousHandlerCreator:
    """Return the function that makes handlers; the entry point ``torchrun.handlers`` calls this."""
    return create_handler
