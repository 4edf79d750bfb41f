"""A watch for replays of CUDA graphs: they write to tensors, and no version counter tells of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

_watches: WeakSet[ReplayWatch] = WeakSet()
_replaced: list[tuple[Any, Any]] = []  # the class and its own method, while there are watches


class ReplayWatch:
    """Calls ``before`` ahead of the first replay after each `begin`, on the replaying thread."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before, self._awaits = before, False
        _look_on()
        _watches.add(self)

    def begin(self) -> None:
        """Wait for a replay."""
        self._awaits = True

    def end(self) -> None:
        """Wait for none any more."""
        self._awaits = False

    def notice(self) -> None:
        """Note that a graph is about to be replayed."""
        if self._awaits:
            self._awaits = False
            self._before()

    def close(self) -> None:
        """Give torch's own method back, if this was the last watch."""
        _watches.discard(self)
        if not _watches:
            _look_away()


def _look_on() -> None:
    kind: Any = torch.cuda.CUDAGraph
    if any(known is kind for known, _ in _replaced):
        return
    own = kind.replay

    def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
        for watch in list(_watches):
            watch.notice()
        return own(graph, *args, **kwargs)

    kind.replay = replay
    _replaced.append((kind, own))


def _look_away() -> None:
    for kind, own in _replaced:
        kind.replay = own
    _replaced.clear()
