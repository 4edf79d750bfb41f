"""The store through which the ranks of a device's group find each other, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.torch_private import Store


class ConnectingStore(torch_private.PythonStore):
    """A view of a store until `leave`; afterwards it has no keys, and no call asks the store.

    NCCL's watchdog writes to its store after an error, while it holds a lock that every collective
    takes. The store may be that of the very node that was lost, and then the write lasts long.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store: Store | None = store

    def leave(self) -> None:
        """Ask the store no more."""
        self._store = None

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key; does nothing after `leave`."""
        if self._store is not None:
            self._store.set(key, value)  # type: ignore[arg-type]  # bytes too, see RankExchange

    def get(self, key: str) -> bytes:
        """Return the value of a key; waits for it. Raises ``PeerError`` after `leave`."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys; waits for all. Raises ``PeerError`` after `leave`."""
        return self._there().multi_get(list(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys at once; does nothing after `leave`."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there. Raises ``PeerError`` after `leave`."""
        store = self._there()
        if timeout is None:
            store.wait(list(keys))
        else:
            store.wait(list(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there; False after `leave`."""
        store = self._store
        return store is not None and store.check(list(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if the key is absent, and return the sum. See `get`."""
        return self._there().add(key, amount)

    def has_extended_api(self) -> bool:
        """Return True: several keys can be set and read at once."""
        return True

    def _there(self) -> Store:
        if self._store is None:
            raise PeerError("the ranks of this group are connected: its store is not asked again")
        return self._store
