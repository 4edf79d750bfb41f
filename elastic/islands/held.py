"""Works that an island holds back: the loss guard may still undo the steps that made them."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.elastic.islands.courier import Outgoing


class HeldWorks:
    """The works that were not given to the courier yet, in order.

    A work is due once ``steps`` more steps than its own are complete: the loss of each of them was
    right, so a guard that goes back so many steps does not go back before the work.
    """

    def __init__(self, *, steps: int) -> None:
        self._steps = steps
        self._works: list[Outgoing] = []

    def put(self, works: Iterable[Outgoing]) -> None:
        """Hold works back."""
        self._works.extend(works)

    def due(self, step: int) -> list[Outgoing]:
        """Remove and return the works that may be sent once ``step`` steps are complete."""
        due = [work for work in self._works if work.step + self._steps <= step]
        self._works = [work for work in self._works if work.step + self._steps > step]
        return due

    def end(self) -> None:
        """Hold nothing back from now on: no loss follows that could show a fault."""
        self._steps = 0

    def clear(self) -> None:
        """Drop the works: their island enters anew."""
        self._works = []
