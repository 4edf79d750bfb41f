"""The hook that prints uncaught errors of Holdfast as their message, without a traceback.

The hook for uncaught exceptions belongs to the user. It is replaced only from the moment such an
error leaves the decorated function until that error is gone: printed at the end of the process, or
caught and freed. Every other exception goes to the previous hook.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

from holdfast.ckpt.errors import FencedError, HoldfastError, InternalError
from holdfast.elastic.errors import Stopped

_Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class _PlainHook:
    """Prints the message of registered errors, and passes all others to the hook ``before``."""

    def __init__(self, before: _Hook) -> None:
        self._before = before
        self._printed: dict[weakref.ref[BaseException], bool] = {}

    def add(self, error: BaseException, *, printed: bool) -> None:
        """Register ``error``; ``printed`` says whether a launcher prints its message."""
        self._printed[weakref.ref(error, self._forget)] = printed

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        printed = next((said for ref, said in self._printed.items() if ref() is error), None)
        if printed is None:
            self._before(kind, error, trace)
        elif not printed:
            sys.stderr.write(f"holdfast: {error}\n")

    def _forget(self, gone: weakref.ref[BaseException]) -> None:
        """Restore the previous hook once no error is left, unless another hook is on top."""
        self._printed.pop(gone, None)
        if not self._printed and sys.excepthook is self:
            sys.excepthook = self._before


def show_plainly(error: Exception, *, printed: bool) -> None:
    """Make ``error``, if it is not caught, end the process with only its message.

    ``printed``: the launcher prints it, so this process prints nothing. Errors that are not
    Holdfast's keep their traceback, and so do a snapshot's ``FencedError`` and ``InternalError``.
    """
    is_ours = isinstance(error, HoldfastError | Stopped)
    if not is_ours or isinstance(error, FencedError | InternalError):
        return
    hook = sys.excepthook
    if not isinstance(hook, _PlainHook):
        sys.excepthook = hook = _PlainHook(hook)
    hook.add(error, printed=printed)
