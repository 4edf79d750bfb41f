"""torch's store over the run's authenticated transport: the client of a `MeetingPoint`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Final

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import ClientPool, RunKey
from holdfast.ckpt.types import Json
from holdfast.elastic.meeting.requests import MeetingAsk, MeetingOp

ANSWER_S: Final = 120.0
"""Longer than the agents need to detect two nodes that cannot reach each other, so that no worker
fails because of them."""

_SLICE_S: Final = 2.0
"""The longest single wait at the server, which keeps the request of a client that is gone so long.
"""


class MeetingStore(torch_private.PythonStore):
    """The keys of the `MeetingPoint` at ``address`` (``host:port``); connects when it is used.

    Safe to share between threads: calls that wait hold up no others. Every method raises
    ``PeerError``: if the server has ended, refuses this run's key, or does not answer within
    ``answer_s``; those that wait for a key also after the store's timeout. torch's groups see this
    object only as long as Python refers to it.
    """

    def __init__(
        self,
        address: str,
        key: RunKey,
        *,
        timeout: timedelta = timedelta(seconds=300),
        answer_s: float = ANSWER_S,
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._address, self._key, self._answer_s = f"tcp://{address}", key, answer_s
        self._pool = ClientPool(self._address, key, timeout_s=answer_s, watch=True)

    def is_of(self, address: str, key: RunKey) -> bool:
        """Return whether these are the keys at ``address`` of the run with this key."""
        return (self._address, self._key) == (f"tcp://{address}", key)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """Return the value of a key; waits for it."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if the key is absent, and return the sum."""
        total, _ = self._ask(MeetingOp.ADD, MeetingAsk(keys=(key,), amount=amount))
        return int(total)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value, empty if the key is absent."""
        self._ask(MeetingOp.APPEND, MeetingAsk(keys=(key,)), [_bytes(value)])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is ``expected``, empty if it is absent; return the value then."""
        values = [_bytes(expected), _bytes(desired)]
        _, found = self._ask(MeetingOp.COMPARE_SET, MeetingAsk(keys=(key,)), values)
        return bytes(found[0])

    def delete_key(self, key: str) -> bool:
        """Delete, and return whether the key existed."""
        done, _ = self._ask(MeetingOp.DELETE, MeetingAsk(keys=(key,)))
        return bool(done)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        found, _ = self._ask(MeetingOp.CHECK, MeetingAsk(keys=tuple(keys)))
        return bool(found)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there, for the store's timeout if none is given."""
        self._await(keys, timeout, wants=False)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys; waits for all."""
        return self._await(keys, None, wants=True) if keys else []

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys at once."""
        self._ask(MeetingOp.SET, MeetingAsk(keys=tuple(keys)), [_bytes(value) for value in values])

    def has_extended_api(self) -> bool:
        """Return True: several keys can be set and read at once."""
        return True

    def close(self) -> None:
        """Release the connections; one in use ends with its call, which raises ``PeerError``."""
        self._pool.close()

    def _await(self, keys: Sequence[str], timeout: timedelta | None, *, wants: bool) -> list[bytes]:
        limit_s = (timeout or torch_private.timeout_of(self)).total_seconds()
        until_s = monotonic() + limit_s
        while True:
            seconds = max(0.0, min(_SLICE_S, until_s - monotonic()))
            ask = MeetingAsk(keys=tuple(keys), seconds=seconds, wants=wants)
            came, values = self._ask(MeetingOp.AWAIT, ask, extra_s=seconds)
            if came:
                return [bytes(value) for value in values]
            if monotonic() >= until_s:
                raise PeerError(
                    f"{self._address}: not all of {', '.join(keys)} came within "
                    f"{limit_s:g} s: look for a rank that failed or hangs"
                )

    def _ask(
        self, op: MeetingOp, ask: MeetingAsk, frames: Sequence[Any] = (), *, extra_s: float = 0.0
    ) -> tuple[Json, list[memoryview]]:
        if self._pool.closed:
            raise PeerError(f"{self._address}: this store is closed: its generation is over")
        with self._pool.lend() as client:
            return client.call(op, ask, frames, timeout_s=self._answer_s + extra_s)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
