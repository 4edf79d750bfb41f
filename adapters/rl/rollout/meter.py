"""Counts of a rollout worker's tokens and time, reported from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.elastic.events import Event, TokensSampled

EVERY_S = 0.25


@dataclass(slots=True)
class Meter:
    """Totals since the worker began: ``sampling_s`` in the engine, ``logging_s`` with its log."""

    tokens: int = 0
    sampling_s: float = 0.0
    logging_s: float = 0.0
    _told_s: float = 0.0

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the time of the ``with`` block as sampling."""
        started = time.perf_counter()
        yield
        self.sampling_s += time.perf_counter() - started

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Count the time of the ``with`` block as writing the log."""
        started = time.perf_counter()
        yield
        self.logging_s += time.perf_counter() - started

    def tell(self, emit: Callable[[Event], None], *, logged_bytes: int) -> None:
        """Emit the totals, unless the last time was less than ``EVERY_S`` ago."""
        now_s = time.monotonic()
        if now_s < self._told_s + EVERY_S:
            return
        self._told_s = now_s
        emit(
            TokensSampled(
                tokens=self.tokens,
                sampling_s=round(self.sampling_s, 6),
                logging_s=round(self.logging_s, 6),
                logged_bytes=logged_bytes,
            )
        )
