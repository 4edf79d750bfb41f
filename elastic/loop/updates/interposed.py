"""Functions that are called before torch's own while a training function runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Interposed:
    """Calls before methods of classes and functions of modules; `close` puts every one back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._closed = False

    def before(self, owner: object, name: str, look: Callable[..., None]) -> None:
        """Call ``look`` with the arguments of every call of ``owner``'s own function ``name``.

        An error of ``look`` ends the call.
        """
        original = vars(owner)[name]

        @functools.wraps(original)
        def interposed(*args: Any, **kwargs: Any) -> Any:
            if not self._closed:
                look(*args, **kwargs)
            return original(*args, **kwargs)

        def undo() -> None:
            if vars(owner).get(name) is interposed:  # else someone replaced it since
                setattr(owner, name, original)

        setattr(owner, name, interposed)
        self._undo.append(undo)

    def close(self) -> None:
        """Put every function back."""
        self._closed = True
        while self._undo:
            self._undo.pop()()
