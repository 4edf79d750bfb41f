"""An all-gather between threads that stand for ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class ThreadGather:
    """One call of every rank's function returns what all ranks said, in their order."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=250)
        self._said: list[Any] = [None] * ranks

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        """Return the function of one rank."""

        def gather(value: Any) -> list[Any]:
            self._said[rank] = value
            self._barrier.wait()
            everyone = list(self._said)
            self._barrier.wait()
            return everyone

        return gather
