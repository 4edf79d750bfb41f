"""gloo among many ranks, of which two connect when they first talk to each other.

Collectives connect in gloo's own threads. gloo's send and receive connect in the thread of the
caller, and may wait there for the other rank, which a program that started both at once does not
expect. So the first ones between two ranks start in a thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import Work

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.apart import KeysApart
from holdfast.elastic.groups.waits import leave_behind

_NO_LIMIT: Final = timedelta(0)


class LazyGloo:
    """A lazy gloo group and its keys, with all operations of gloo's."""

    def __init__(self, gloo: Any, keys: KeysApart) -> None:
        self._gloo, self._keys = gloo, keys
        self._lock = threading.Lock()
        self._last: dict[int, FirstMessage] = {}
        self._met: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        """Return another operation of gloo's."""
        return getattr(self._gloo, name)

    def leave(self) -> None:
        """Connect no more ranks."""
        self._keys.leave()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Start to send to a rank of the group."""
        return self._start(functools.partial(self._gloo.send, tensors, peer, tag), peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Start to receive from a rank of the group."""
        return self._start(functools.partial(self._gloo.recv, tensors, peer, tag), peer)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        """Refuse it with ``ConfigError``: it would connect this rank with all."""
        raise ConfigError(
            f"a rank receives from any of the {self._gloo.size()} of its group, and would connect "
            "with all of them: name the source (src=), or make a smaller group for it "
            "(dist.new_group)"
        )

    def _start(self, operation: Callable[[], Work], peer: int) -> Work:
        """Start it here if the ranks have met, else after what was started with this peer."""
        with self._lock:
            last = self._last.get(peer)
            if last is None or last.is_open():
                if last is not None:
                    del self._last[peer]
                    self._met.add(peer)
                if peer in self._met:
                    return operation()
            found = self._last[peer] = FirstMessage(operation, after=last)
        found.begin()
        return found


class FirstMessage(Work):
    """An operation that starts in a thread, after another one with the same rank."""

    def __init__(self, operation: Callable[[], Work], *, after: FirstMessage | None) -> None:
        super().__init__()
        self._operation, self._after = operation, after
        self._started = threading.Event()
        self._inner: Work | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Start the thread."""
        thread = threading.Thread(target=self._run, name="open-peer", daemon=True)
        leave_behind(thread)
        thread.start()

    def is_open(self) -> bool:
        """Return whether it has started, so that the two ranks are connected."""
        return self._inner is not None

    def _run(self) -> None:
        try:
            if self._after is not None:
                self._after.await_start()
                self._after = None
            self._inner = self._operation()
        except Exception as error:  # noqa: BLE001 - raised again by the one that waits
            self._error = error
        finally:
            self._started.set()

    def await_start(self) -> Work:
        """Return the operation as soon as it has started, or raise why it could not."""
        self._started.wait()
        if self._error is not None:
            raise self._error
        assert self._inner is not None
        return self._inner

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait for completion."""
        return self.await_start().wait(timeout)

    def is_completed(self) -> bool:
        """Return whether it is complete, or failed to start."""
        return self._error is not None or (self._inner is not None and self._inner.is_completed())

    def is_success(self) -> bool:
        """Return whether it completed without an error."""
        return self._inner is not None and self._inner.is_success()

    def get_future(self) -> Any:
        """Return a future of the operation."""
        return self.await_start().get_future()

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        return self.await_start().result()
