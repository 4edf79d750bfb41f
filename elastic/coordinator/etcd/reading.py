"""The one thread of a process that reads the watches of all its connections to etcd.

A blocking stream of gRPC takes three threads, which wake up fifteen times a second even if nothing
comes. gRPC's asynchronous streams share one thread, which sleeps until something comes.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any

_making = threading.Lock()


def start(work: Coroutine[Any, Any, None]) -> Callable[[], object]:
    """Run ``work`` on the thread; return a function that cancels it. Callable from any thread."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).cancel


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
