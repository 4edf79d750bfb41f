"""Work on many files or blocks by a few threads, in order, with little of it ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int
) -> Iterator[Result]:
    """Yield ``work`` of each item, in order, from ``threads`` threads; few run ahead.

    Raises the error of ``work``, after the results before it were yielded.
    """
    ahead: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-parallel") as pool:
        try:
            for item in items:
                ahead.append(pool.submit(work, item))
                if len(ahead) > 2 * threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
