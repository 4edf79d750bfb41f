"""The one thread of a process that reads the streams of all its connections to etcd.

A blocking stream of gRPC takes three threads, which wake up fifteen times a second even if nothing
comes. gRPC's asynchronous streams share one thread, which sleeps until something comes.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_making = threading.Lock()
_T = TypeVar("_T")


def start(work: Coroutine[Any, Any, None]) -> Callable[[], object]:
    """Run ``work`` on the thread; return a function that cancels it. Callable from any thread."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).cancel


def result(work: Coroutine[Any, Any, _T], *, timeout_s: float) -> _T:
    """Return the result of ``work`` on the thread; cancel it and raise ``TimeoutError`` if late."""
    return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout_s), _loop()).result()


def soon(act: Callable[[], object]) -> None:
    """Call ``act``, which must not block, on the thread; callable from any thread."""
    _loop().call_soon_threadsafe(act)


def _loop() -> asyncio.AbstractEventLoop:
    with _making:
        return _started()


@functools.cache
def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="etcd-watches", daemon=True).start()
    return loop
