"""The meaning of a failed request: whether and where to retry it, and the user's remedy."""

from __future__ import annotations

import pytest

from holdfast.elastic.coordinator.etcd.failures import Meaning, advice, judge


@pytest.mark.parametrize(
    ("code", "text", "meaning"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; last error: ...", Meaning.NOT_DONE),
        ("UNAVAILABLE", "etcdserver: no leader", Meaning.NOT_DONE),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Meaning.NOT_DONE),
        ("UNAVAILABLE", "Socket closed", Meaning.LOST),
        ("UNAVAILABLE", "etcdserver: leader changed", Meaning.LOST),
        ("UNAVAILABLE", "etcdserver: request timed out", Meaning.LOST),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Meaning.LOST),
        ("UNKNOWN", "context deadline exceeded", Meaning.LOST),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", Meaning.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Meaning.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", Meaning.TOKEN),
        ("NOT_FOUND", "etcdserver: requested lease not found", Meaning.REFUSED),
        ("PERMISSION_DENIED", "etcdserver: permission denied", Meaning.REFUSED),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Meaning.REFUSED),
    ],
)
def test_meaning(code: str, text: str, meaning: Meaning) -> None:
    failure = judge(code, text)
    assert failure.meaning is meaning
    assert failure.member_fails == (meaning in (Meaning.NOT_DONE, Meaning.LOST))
    assert failure.connection_fails == (code == "DEADLINE_EXCEEDED")
    assert failure.lease_gone == (code == "NOT_FOUND")


def test_only_what_surely_was_not_done_may_be_repeated_blindly() -> None:
    for text in ("Socket closed", "etcdserver: request timed out, possibly due to lost leader"):
        assert judge("UNAVAILABLE", text).meaning is Meaning.LOST


def test_advice_fits_the_failure() -> None:
    assert "write etcd://USER@" in advice("etcdserver: user name is empty")
    assert "compact" in advice("etcdserver: mvcc: database space exceeded")
    assert "majority" in advice("Socket closed")
