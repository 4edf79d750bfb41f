"""The meaning of failed requests to etcd: a table from the error to the allowed responses. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Meaning(Enum):
    """The known state of a failed request.

    REFUSED: it was not done, and a retry changes nothing. NOT_DONE: it was not done; another member
    or a later retry may do it. TOKEN: it was not done, because the token is no longer known. LOST:
    it is unknown whether it was done.
    """

    REFUSED = "refused"
    NOT_DONE = "not done"
    TOKEN = "token"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """A failed request: gRPC's status code and text, and what they mean."""

    code: str
    text: str
    meaning: Meaning

    @property
    def lease_gone(self) -> bool:
        """True if the request's lease has ended."""
        return "requested lease not found" in self.text

    @property
    def member_fails(self) -> bool:
        """True if the next request should go to another member."""
        return self.meaning in (Meaning.NOT_DONE, Meaning.LOST)

    @property
    def connection_fails(self) -> bool:
        """True if the connection may be dead without an error."""
        return self.code == "DEADLINE_EXCEEDED"


_NOT_DONE = (
    "failed to connect to all addresses",  # gRPC: there was no connection to send it by
    "etcdserver: no leader",
    "etcdserver: not leader",
    "etcdserver: too many requests",
    "etcdserver: server stopped",
    "etcdserver: rpc not supported for learner",
)
_TOKEN = (
    "etcdserver: invalid auth token",
    "etcdserver: revision of auth store is old",
    "etcdserver: user name is empty",
)
_LOST_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "CANCELLED", "INTERNAL", "ABORTED")

_TOO_LARGE = "raise its --max-request-bytes"
_ADVICE = (
    ("user name is empty", "it wants a user: write etcd://USER@HOST:PORT?password=FILE"),
    ("invalid user ID or password", "check user and password file of the address"),
    ("permission denied", "grant the user's role read and write for the address's prefix"),
    ("database space exceeded", "compact and defragment it, then disarm the alarm"),
    ("request is too large", _TOO_LARGE),
    ("larger than max", _TOO_LARGE),
    ("andshake failed", "check the ca=FILE, cert=FILE and key=FILE of the address"),
    ("requested lease not found", "stop acting, then ask for a new lease"),
)
_OTHERWISE = "check the address and that a majority of its members runs"


def judge(code: str, text: str) -> RequestFailure:
    """Return the meaning of gRPC's status ``code`` (its name) with ``text``."""
    return RequestFailure(code=code, text=text, meaning=_meaning(code, text))


def advice(text: str) -> str:
    """Return the remedy for a failure with the text ``text``."""
    return next((said for mark, said in _ADVICE if mark in text), _OTHERWISE)


def _meaning(code: str, text: str) -> Meaning:
    if any(mark in text for mark in _TOKEN):
        return Meaning.TOKEN
    if any(mark in text for mark in _NOT_DONE):
        return Meaning.NOT_DONE
    return Meaning.LOST if code in _LOST_CODES else Meaning.REFUSED
