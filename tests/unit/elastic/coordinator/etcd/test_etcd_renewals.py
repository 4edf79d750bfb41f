"""Leases are renewed on one open stream, which a failure ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.elastic.coordinator.etcd.failures import Meaning, judge
from holdfast.elastic.coordinator.etcd.renewals import Renewals, UnansweredError
from holdfast.elastic.coordinator.etcd.stubs import grpc, rpc

LATER_S = 30.0


class Member:
    """Plays a member: answers each renewal, or does as told once."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.canceled = 0
        self.does: Any = None
        self._asked = 0

    def open(self, metadata: Any) -> Member:
        self.opened.append(metadata)
        return self

    async def write(self, request: Any) -> None:
        self._asked = request.ID

    async def read(self) -> Any:
        does, self.does = self.does, None
        if isinstance(does, BaseException):
            raise does
        if does == "nothing":
            await asyncio.sleep(LATER_S)
        return rpc.LeaseKeepAliveResponse(ID=self._asked, TTL=6) if does is None else does

    def cancel(self) -> None:
        self.canceled += 1


@pytest.fixture
def member() -> Member:
    return Member()


@pytest.fixture
def renewals(member: Member) -> Renewals:
    return Renewals(member.open)


def renew(renewals: Renewals, lease: int, *, timeout_s: float = LATER_S, said: Any = ()) -> int:
    return int(renewals.renew(lease, timeout_s=timeout_s, metadata=said).TTL)


def test_all_renewals_take_one_stream(member: Member, renewals: Renewals) -> None:
    assert [renew(renewals, lease) for lease in (1, 2, 1)] == [6, 6, 6]
    assert (len(member.opened), member.canceled) == (1, 0)


def test_another_token_takes_another_stream(member: Member, renewals: Renewals) -> None:
    renew(renewals, 1, said=(("token", "old"),))
    renew(renewals, 1, said=(("token", "new"),))
    assert (len(member.opened), member.canceled) == (2, 1)


@pytest.mark.parametrize(
    ("does", "code"),
    [
        (grpc.aio.EOF, "UNAVAILABLE"),
        (rpc.LeaseKeepAliveResponse(ID=99, TTL=6), "UNAVAILABLE"),
        (asyncio.InvalidStateError(), "UNAVAILABLE"),
        (asyncio.CancelledError(), "CANCELLED"),
        ("nothing", "DEADLINE_EXCEEDED"),
    ],
)
def test_a_failure_ends_the_stream_and_the_next_renewal_opens_one(
    member: Member, renewals: Renewals, does: Any, code: str
) -> None:
    renew(renewals, 1)
    member.does = does
    with pytest.raises(UnansweredError) as caught:
        renew(renewals, 1, timeout_s=0.05 if does == "nothing" else LATER_S)
    assert caught.value.code().name == code
    assert judge(code, caught.value.details()).meaning is Meaning.LOST
    assert member.canceled == 1
    assert renew(renewals, 1) == 6
    assert len(member.opened) == 2


def test_the_error_of_a_member_is_passed_on(member: Member, renewals: Renewals) -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "no leader"
    )
    member.does = error
    with pytest.raises(grpc.RpcError) as caught:
        renew(renewals, 1)
    assert caught.value is error and member.canceled == 1
