"""Notices that this node is about to be taken away: a signal, a file, or a URL of the cloud's."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

_TIMEOUT_S: Final = 1.0
_MAX_BODY: Final = 1 << 16
_NO: Final = (b"", b"false", b"none", b"no")

LEFT_STATUS: Final = 75
"""Exit status of an agent that left after a notice (``EX_TEMPFAIL``): it is not started again."""


class NoticeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where notices come from besides SIGTERM; looked at every ``every_s`` seconds.

    ``file``: a notice once it exists; ``{node}`` in it stands for the node's name. ``url``: a
    notice once a GET with ``headers`` succeeds with a body that is not empty, ``FALSE`` or
    ``NONE``; errors, as the 404 of a machine that stays, are none. ``grace_s`` is the time from a
    notice to the end.
    """

    file: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    every_s: float = 1.0
    grace_s: float = 25.0

    def __post_init__(self) -> None:
        if self.every_s <= 0:
            raise ValueError(f"every_s is {self.every_s}, it must be positive")
        if self.grace_s <= 0:
            raise ValueError(f"grace_s is {self.grace_s}, it must be positive")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}, give one that starts with http:// or https://")


class NoticeWatch:
    """Looks for a notice on a thread of its own and calls ``notice(why)`` once, there."""

    def __init__(self, config: NoticeConfig, *, node: str, notice: Callable[[str], None]) -> None:
        self._config, self._notice = config, notice
        self._file = Path(config.file.replace("{node}", node)) if config.file else None
        self._closed = threading.Event()
        if self._file or config.url:
            threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def _watch(self) -> None:
        while not (why := self._look()):
            if self._closed.wait(self._config.every_s):
                return
        if not self._closed.is_set():
            self._notice(why)

    def _look(self) -> str:
        if self._file is not None and self._file.exists():
            return f"the file {self._file} is there"
        if self._config.url and (said := ask(self._config.url, headers=self._config.headers)):
            return f"{self._config.url} says {said}"
        return ""

    def close(self) -> None:
        """Stop looking; an answer under way is not waited for."""
        self._closed.set()


def ask(url: str, *, headers: dict[str, str]) -> str:
    """Return the notice that ``url`` gives, empty when it gives none or cannot be reached."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            body = answer.read(_MAX_BODY).strip()
    except (OSError, ValueError, urllib.error.HTTPError):
        return ""
    return "" if body.lower() in _NO else str(body[:200].decode(errors="replace"))
