"""Errors that cross a wire keep their class by their code; an unknown code keeps its message."""

from __future__ import annotations

from typing import Any

import pytest
from newer_peer import NewerError, newer_handler

from holdfast.ckpt import collective
from holdfast.ckpt.errors import (
    ArgumentError,
    BudgetError,
    BusyError,
    CapacityError,
    CkptError,
    CorruptError,
    FencedError,
    GivenUpError,
    HoldfastError,
    ImmutableError,
    InternalError,
    MismatchError,
    NotFoundError,
    PeerError,
    StateError,
    StoreError,
    code_of,
    from_peer,
)
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.transport import Request, RunKey, Server

SAME = [
    StateError,
    MismatchError,
    CorruptError,
    NotFoundError,
    StoreError,
    CapacityError,
    BudgetError,
    FencedError,
    GivenUpError,
]
OTHERS = [HoldfastError, CkptError, PeerError, BusyError, ImmutableError, InternalError, NewerError]


@pytest.mark.parametrize("kind", SAME)
def test_a_code_becomes_its_class_again(kind: type[CkptError]) -> None:
    found = from_peer(code_of(kind("why")), "why")
    assert type(found) is kind
    assert str(found) == "why"


@pytest.mark.parametrize("kind", OTHERS)
def test_any_other_code_becomes_a_refusal_of_the_peer(kind: type[HoldfastError]) -> None:
    found = from_peer(code_of(kind("why")), "why")
    assert type(found) is PeerError
    assert found.peer_code == kind.code
    assert str(found) == "why"


def test_a_foreign_exception_is_an_internal_error_to_others() -> None:
    assert code_of(ZeroDivisionError()) == InternalError.code


def test_a_sidecars_error_comes_back_as_its_class() -> None:
    def handle(request: Request) -> None:
        if request.op == "newer":
            newer_handler(request)
        raise CorruptError("block 3 is damaged")

    key = RunKey.new()
    server = Server(handle, key=key)
    client = SidecarClient(server.address, key)
    with pytest.raises(CorruptError, match=r"^block 3 is damaged$"):
        client.call("open")
    with pytest.raises(PeerError, match=r"^newer: told by a later version$") as refused:
        client.call("newer")
    assert refused.value.peer_code == NewerError.code
    client.close()
    server.close()


class TwoRanks(collective.RankWorld):
    """Rank 0 of two, the other of which fails."""

    def __init__(self, other: Exception) -> None:
        super().__init__()
        self._other = other

    def gather(self, value: Any) -> list[Any]:
        """Return what rank 0 offers, and what rank 1 would."""
        raised: list[Any] = []

        class Alone(collective.RankWorld):
            def gather(self, value: Any) -> list[Any]:
                raised.append(value)
                return [None]

        with pytest.raises(type(self._other)), Alone().agreed():
            raise self._other
        failure = raised[0]
        return [value, {"code": failure.code, "message": failure.message}]


@pytest.mark.parametrize(
    ("error", "kind", "code", "message"),
    [
        (StateError("x: a lambda"), StateError, "", "rank 1: x: a lambda"),
        (ArgumentError("step is x"), ArgumentError, "", "rank 1: step is x"),
        (NewerError("why"), PeerError, "HF999", "rank 1: why"),
        (ValueError("no"), PeerError, "HF002", "rank 1: ValueError: no"),
    ],
)
def test_the_failure_of_one_rank_is_raised_on_the_others(
    error: Exception, kind: type[CkptError], code: str, message: str
) -> None:
    with pytest.raises(kind) as caught, TwoRanks(error).agreed():
        pass
    assert type(caught.value) is kind
    assert str(caught.value) == message
    assert getattr(caught.value, "peer_code", "") == code
