"""A fault that stays in force for new processes and connections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_AGAIN_S: Final = 0.05
_JOIN_S: Final = 10.0


class KeptUp:
    """Calls ``apply`` at once, and then repeatedly on its own thread until its end."""

    def __init__(self, apply: Callable[[], None], *, name: str) -> None:
        self._apply, self._over = apply, threading.Event()
        apply()
        self._thread = threading.Thread(target=self._go_on, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop the calls; a second call does nothing."""
        self._over.set()
        self._thread.join(_JOIN_S)

    def _go_on(self) -> None:
        while not self._over.wait(_AGAIN_S):
            self._apply()
