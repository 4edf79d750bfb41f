"""The gather of plans in a large world: through keys like `StoreGather`, and through circles.

At one point, N ranks would each read N values. Here the ranks of a circle exchange at its leader's
point, the leaders pass on what they have, and all comes back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.snapshot.store_gather import REPLAN_TIMEOUT_S, StoreGather


class CircleGather(NamedTuple):
    """The exchanges of one circle, towards the root and back; this rank ``leads`` it or not."""

    leads: bool
    up: StoreGather
    down: StoreGather


class TreeGather:
    """A gather of JSON values, for one caller at each of ``size`` members; see `StoreGather`.

    ``path`` are the circles of ``member`` from the leaves on, as `MessageTree` has them.
    """

    def __init__(self, path: Sequence[CircleGather], *, member: int, size: int) -> None:
        self._path, self._member, self._size = tuple(path), member, size
        self._over = ""
        self.timeout_s = REPLAN_TIMEOUT_S

    def __call__(self, value: Any) -> list[Any]:
        """Return every member's value, in order.

        Raises ``StateError`` if other members do not call it in time, and at every later call.
        """
        if self._over:
            raise StateError(
                f"the ranks cannot plan together after an earlier failure: {self._over}"
            )
        try:
            return self._exchanged(value)
        except StateError as error:
            self._over = str(error)
            for circle in self._path:  # the others wait for this one to come back
                circle.up.give_up()
                circle.down.give_up()
            raise

    def _exchanged(self, value: Any) -> list[Any]:
        known: dict[str, Any] = {str(self._member): value}
        for circle in self._path:
            known = {
                member: each
                for part in self._in_time(circle.up, known)
                for member, each in part.items()
            }
        for circle in reversed(self._path):
            known = self._in_time(circle.down, known if circle.leads else None)[0]
        return [known[str(member)] for member in range(self._size)]

    def _in_time(self, gather: StoreGather, value: Any) -> list[Any]:
        gather.timeout_s = self.timeout_s
        return gather(value)
