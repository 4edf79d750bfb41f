"""The stream on which leases are renewed at one member of etcd, as etcd's own clients keep it open.

To open a stream for each renewal takes the member and the agent several times as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, Final

from holdfast.elastic.coordinator.etcd import reading
from holdfast.elastic.coordinator.etcd.stubs import grpc, rpc

Open = Callable[[Any], Any]
"""Opens an asynchronous stream of renewals with the given metadata; on the thread of `reading`."""


class UnansweredError(grpc.RpcError):  # type: ignore[misc]  # gRPC has no types
    """The member did not answer a renewal in time, or ended the stream."""

    def __init__(self, code: Any, text: str) -> None:
        super().__init__(text)
        self._code, self._text = code, text

    def code(self) -> Any:
        """Return gRPC's status code."""
        return self._code

    def details(self) -> str:
        """Return the reason."""
        return self._text


class Renewals:
    """Renews leases one after the other; a failure ends the stream, and the next call opens one."""

    def __init__(self, open_stream: Open) -> None:
        self._open = open_stream
        self._turn = asyncio.Lock()
        self._call: Any = None
        self._said: Any = None

    def renew(self, lease: int, *, timeout_s: float, metadata: Any) -> Any:
        """Return etcd's answer to a renewal. Raises gRPC's errors; callable from any thread."""
        try:
            return reading.result(self._renew(lease, metadata), timeout_s=timeout_s)
        except TimeoutError:
            raise UnansweredError(_LATE, f"no answer to a renewal in {timeout_s:g} s") from None
        except CancelledError:
            raise UnansweredError(_CLOSED, "this connection is closed") from None

    async def _renew(self, lease: int, metadata: Any) -> Any:
        async with self._turn:
            try:
                if self._call is None or self._said != metadata:
                    self._end()
                    self._call, self._said = self._open(metadata), metadata
                await self._call.write(rpc.LeaseKeepAliveRequest(ID=lease))
                answer = await self._call.read()
                if answer is grpc.aio.EOF or lease != answer.ID:
                    raise UnansweredError(_ENDED, "the member ended a stream of renewals")
            except asyncio.InvalidStateError:  # it ended since the last renewal
                self._end()
                raise UnansweredError(_ENDED, "the member ended a stream of renewals") from None
            except BaseException:
                self._end()
                raise
            return answer

    def _end(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


_LATE: Final = grpc.StatusCode.DEADLINE_EXCEEDED
_CLOSED: Final = grpc.StatusCode.CANCELLED
_ENDED: Final = grpc.StatusCode.UNAVAILABLE
