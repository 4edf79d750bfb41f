"""Parts pushed by one thread, pulled by another one that consumes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from holdfast.ckpt.errors import InternalError, StateError


class _AbandonedError(InternalError):
    """Raised in the consumer, so that it unwinds and leaves nothing."""


class Handover:
    """Runs ``consume(parts)`` in a thread; `push` gives it the next part, and one part may wait."""

    def __init__(self, consume: Callable[[Iterator[memoryview]], object]) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[memoryview] = deque()
        self._ended = self._abandoned = self._gone = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(consume,), name="ckpt-fill", daemon=True
        )
        self._thread.start()

    def _run(self, consume: Callable[[Iterator[memoryview]], object]) -> None:
        try:
            consume(self._parts())
        except _AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001  raised again in the waiting thread
            self._error = error
        finally:
            with self._changed:
                self._gone = True
                self._changed.notify_all()

    def _parts(self) -> Iterator[memoryview]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended or self._abandoned)
                if self._abandoned:
                    raise _AbandonedError
                if not self._waiting:
                    return
                part = self._waiting.popleft()
                self._changed.notify_all()
            yield part
            del part

    def push(self, part: memoryview) -> None:
        """Hand over the next part; raises the consumer's error."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._gone)
            if not self._gone:
                self._waiting.append(part)
                self._changed.notify_all()
                return
        self._raise()
        raise StateError("there are more bytes than the file has room for")

    def finish(self) -> None:
        """End the parts and wait until the consumer is done; raises its error."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        self._raise()

    def abandon(self) -> None:
        """Stop the consumer and wait until it has ended."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
