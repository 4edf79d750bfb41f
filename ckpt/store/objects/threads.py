"""Requests on several threads at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

_T = TypeVar("_T")


def each(pool: Executor, actions: Sequence[Callable[[], _T]]) -> list[_T]:
    """Run ``actions`` on the threads of ``pool`` and return their results, in order.

    When one fails, its error is raised after the others have ended too, so that nothing touches
    their buffers afterwards.
    """
    if len(actions) == 1:
        return [actions[0]()]
    return settle([pool.submit(action) for action in actions])


def settle(futures: Sequence[Future[_T]], *, raising: bool = True) -> list[_T]:
    """Wait until all have ended and return their results; after a failure, no other one begins."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, return_when="FIRST_EXCEPTION")
        if any(not future.cancelled() and future.exception() for future in done):
            for future in pending:
                future.cancel()
            wait(pending)
            break
    ended = [future for future in futures if not future.cancelled()]
    if not raising:
        return []
    for future in ended:
        future.result()
    return [future.result() for future in ended]
