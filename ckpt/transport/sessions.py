"""The sessions of a server's bulk path: admission, keys and counters."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import msgspec

from holdfast.ckpt.transport.envelope import SESSION_BYTES, EnvelopeError, Reason
from holdfast.ckpt.transport.limits import TransportLimits
from holdfast.ckpt.transport.sealing import KEY_BYTES, Sealer
from holdfast.ckpt.types import learn

SESSION = "__session__"
"""The operation by which a client asks for a session over the control path."""

_TOKEN_BYTES = 16


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a session; ``instead`` names the one it replaces, which ends."""

    instead: bytes = b""


class SessionGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A session: its name, its key, and the port and token for the connection.

    ``life_s`` is its life. ``seen`` is the last counter that was taken in the session it replaces,
    or -1 if that one is unknown.
    """

    session: bytes
    key: bytes
    token: str
    port: int
    life_s: float
    seen: int = -1


@dataclass(slots=True, kw_only=True)
class BulkSession:
    """One client's session. ``counter`` is that of the last request taken."""

    sealer: Sealer
    token: str
    ends_s: float
    counter: int = 0


class Sessions:
    """The open sessions, by name; bounded in number and age. Safe to share between threads."""

    def __init__(self, limits: TransportLimits, *, clock: Callable[[], float] = monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._lock = threading.Lock()
        self._table: OrderedDict[bytes, BulkSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def open(self, ask: Ask, *, port: int) -> SessionGrant:
        """Open a session; where there are too many, those unused for longest end."""
        name, key = secrets.token_bytes(SESSION_BYTES), secrets.token_bytes(KEY_BYTES)
        token = secrets.token_hex(_TOKEN_BYTES)
        now_s = self._clock()
        with self._lock:
            replaced = self._table.pop(ask.instead, None)
            for old in [n for n, each in self._table.items() if each.ends_s <= now_s]:
                del self._table[old]
            while len(self._table) >= self._limits.sessions:
                self._table.popitem(last=False)
            self._table[name] = BulkSession(
                sealer=Sealer(name, key), token=token, ends_s=now_s + self._limits.session_s
            )
        return SessionGrant(
            session=name,
            key=key,
            token=token,
            port=port,
            life_s=self._limits.session_s,
            seen=-1 if replaced is None else replaced.counter,
        )

    def admits(self, user: bytes, password: bytes) -> bool:
        """Return whether a connection's credentials are an open session and its token."""
        try:
            session = self._table.get(bytes.fromhex(user.decode()))
        except ValueError:
            return False
        return session is not None and secrets.compare_digest(session.token.encode(), password)

    def find(self, name: bytes) -> BulkSession:
        """Return an open session, marked as just used. Raises ``EnvelopeError``."""
        with self._lock:
            return self._find(name)

    def take(self, name: bytes, counter: int) -> None:
        """Use up a counter, once its whole message was found genuine.

        The client that replaces the session learns the counter, so that no request runs twice.
        Raises ``EnvelopeError`` if the session has ended or is past that counter.
        """
        with self._lock:
            session = self._find(name)
            if counter <= session.counter:
                raise EnvelopeError(Reason.REPLAYED, f"counter {counter} was there already")
            session.counter = counter

    def _find(self, name: bytes) -> BulkSession:
        session = self._table.get(name)
        if session is None or session.ends_s <= self._clock():
            raise EnvelopeError(Reason.UNKNOWN_SESSION, "no such session: open one")
        self._table.move_to_end(name)
        return session


learn(globals())
