"""Tokens that wait for the record that they share in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.adapters.rl.samples.trajectory import Delta


class Unlogged:
    """Deltas until there are ``every`` tokens, or one of a finished sample: ``write`` gets them."""

    def __init__(self, every: int, write: Callable[[list[Delta]], object]) -> None:
        self._every, self._write = every, write
        self._deltas: list[Delta] = []
        self._is_due = False
        self._blocks = 0

    def keep(self, delta: Delta) -> None:
        """Let a delta wait for what is added next."""
        self._deltas.append(delta)

    def add(self, delta: Delta, *, finished: bool) -> None:
        """Add a delta, and write what is due, unless in a block of `together`."""
        self._deltas.append(delta)
        self._is_due = (
            self._is_due or finished or sum(len(e.tokens) for e in self._deltas) >= self._every
        )
        self._write_due()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write what is added in the block at its end: one record, one wait for the log."""
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            self._write_due()

    def take(self) -> list[Delta]:
        """Return all deltas; they wait no longer."""
        deltas, self._deltas, self._is_due = self._deltas, [], False
        return deltas

    def _write_due(self) -> None:
        if self._is_due and not self._blocks:
            self._write(self.take())
