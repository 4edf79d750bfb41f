"""The exchange in which gloo forms a group, with few requests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from holdfast.ckpt import torch_private
from holdfast.ckpt.torch_private import Store


class RankExchange(torch_private.PythonStore):
    """A view of a store, for the formation of one group of ``size`` ranks.

    gloo sets one key whose last part is its rank, then waits for and reads those of all ranks, one
    after another. Here the first of these reads brings all. Its keys are written once, so a value
    that was read stays valid.
    """

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        super().__init__()
        self._store, self._rank, self._size = store, rank, size
        self._mine = ""
        self._read: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        before, slash, rank = key.rpartition("/")
        if rank == str(self._rank):
            self._mine = before + slash
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes too, though the stubs say text

    def get(self, key: str) -> bytes:
        """Return the value of a key; waits for it."""
        if key not in self._read:
            self._fetch([key])
        return self._read[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        if missing := [key for key in keys if key not in self._read]:
            if timeout is not None:
                self._store.set_timeout(timeout)
            self._fetch(missing)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return self._store.check(list(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if the key is absent, and return the sum."""
        return self._store.add(key, amount)

    def _fetch(self, keys: Sequence[str]) -> None:
        everyone = [f"{self._mine}{rank}" for rank in range(self._size)]
        wanted = everyone if self._mine and set(keys) <= set(everyone) else list(keys)
        self._read.update(zip(wanted, self._store.multi_get(wanted), strict=True))
