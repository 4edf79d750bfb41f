"""The newest state of a run in sections with versions, which any number of pages catch up with.

Nothing is queued for a page: it gets the sections that are newer than the version it has, as they
are now. A slow page skips what lies between.
"""

from __future__ import annotations

import threading
import time
from typing import Final

import msgspec

from holdfast.tools.dashboard.sections import sections
from holdfast.tools.dashboard.stored import Shelf
from holdfast.tools.live.follow import Follower
from holdfast.tools.live.view import RunView

_POLL_S: Final = 0.5
_ASK_S: Final = 2.0
_NODES_ASKED_PER_S: Final = 100
_SHARE: Final = 0.1
"""The share of a processor that making views may take."""

_MANY: Final = 5000
"""Events in one reading after which more of them lie ready."""

_LOOKED_S: Final = 10.0
"""The time after the last sign of a page in which it still counts as there."""

_CURVES_S: Final = 2.0
_CURVES: Final = ("progress", "steps", "curves")


class Board:
    """Sections, each with the version at which it changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sections: dict[str, tuple[int, bytes]] = {}
        self._gone: dict[str, int] = {}
        self.version = 0

    def update(self, fresh: dict[str, bytes], *, whole: bool) -> None:
        """Put in the sections that changed; with ``whole`` all others go."""
        with self._lock:
            self.version += 1
            for name, data in fresh.items():
                if name not in self._sections or self._sections[name][1] != data:
                    self._sections[name] = self.version, data
                    self._gone.pop(name, None)
            if whole:
                for name in self._sections.keys() - fresh.keys():
                    del self._sections[name]
                    self._gone[name] = self.version

    def since(self, version: int) -> tuple[int, bytes]:
        """Return the newest version, and as JSON the sections that are newer than ``version``."""
        with self._lock:
            newer = [(name, data) for name, (at, data) in self._sections.items() if at > version]
            gone = [name for name, at in self._gone.items() if at > version]
            now = self.version
        parts = [msgspec.json.encode(name) + b":" + data for name, data in newer]
        parts += [msgspec.json.encode(name) + b":null" for name in gone]
        return now, b"{" + b",".join(parts) + b"}"


class Hub:
    """Reads a run in two threads of its own, and keeps a `Board` up to date while pages look."""

    def __init__(
        self,
        follower: Follower,
        *,
        shelf: Shelf | None = None,
    ) -> None:
        self.board = Board()
        self.follower, self._shelf = follower, shelf
        self._stop = threading.Event()
        self._looked_s = -1e9
        self._curves_s = -1e9
        self._view: RunView | None = None
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._read, "dashboard-read"), (self._ask, "dashboard-ask"))
        ]

    def start(self) -> None:
        """Begin to read and to ask; a first view is there on return."""
        self._catch_up()
        self.refresh()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=5.0)

    def look(self) -> None:
        """Say that a page looks: views are made for some seconds from now on."""
        self._looked_s = time.monotonic()

    @property
    def view(self) -> RunView:
        """The newest view."""
        assert self._view is not None
        return self._view

    def refresh(self) -> float:
        """Make a view of what is known, and return the seconds that it took."""
        began_s = time.monotonic()
        with self._lock:
            view = self.follower.view()
            self._view = view
            fresh = dict(sections(view, extra={"silence": self.follower.silence}))
            if self._shelf is not None:
                fresh["stored"] = msgspec.json.encode(self._shelf.found)
            if began_s - self._curves_s < _CURVES_S and view.ended_s is None:
                kept = {name: data for name, data in fresh.items() if name not in _CURVES}
                self.board.update(kept, whole=False)
            else:
                self._curves_s = began_s
                self.board.update(fresh, whole=True)
        return time.monotonic() - began_s

    def _catch_up(self) -> None:
        """Read the first part of what is there, so that the first view is not empty."""
        with self._lock:
            self.follower.read()

    def _read(self) -> None:
        rest_s = _POLL_S
        while not self._stop.wait(rest_s):
            with self._lock:
                count = self.follower.read()
            rest_s = 0.0 if count > _MANY else _POLL_S
            if time.monotonic() - self._looked_s < _LOOKED_S:
                rest_s = max(rest_s, self.refresh() / _SHARE)

    def _ask(self) -> None:
        while True:
            if time.monotonic() - self._looked_s < _LOOKED_S:
                self.follower.ask()
                if self._shelf is not None:
                    self._shelf.look()
            rest_s = max(_ASK_S, len(self.follower.statuses) / _NODES_ASKED_PER_S)
            if self._stop.wait(rest_s):
                return
