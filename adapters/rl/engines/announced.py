"""Servers that announce themselves in a directory, for pools elsewhere.

Each has a file there with its address, whose lock it holds while it may be asked. The kernel
releases the lock when the process that holds it ends in any way. For several machines the directory
must be on a shared file system with locks.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from holdfast.adapters.rl.engines.protocol import SamplingEngine
from holdfast.adapters.rl.server.meeting import Lock, is_held
from holdfast.elastic.errors import ConfigError

_SERVERS: Final = "servers"


class Announcement:
    """Announces the server at ``url`` in ``directory``, until it is withdrawn or the process ends.

    Raises ``ConfigError`` if the directory cannot be written.
    """

    def __init__(self, directory: str | Path, url: str) -> None:
        self._path = Path(directory) / _SERVERS / uuid.uuid4().hex
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = Lock(self._path, url.encode())
        except OSError as error:
            raise ConfigError(
                f"{directory}: {error.strerror}; give a directory that can be written"
            ) from error

    def withdraw(self) -> None:
        """Let pools give it nothing more, and move its answers; may be called again."""
        self._path.unlink(missing_ok=True)
        self._lock.release()


class AnnouncedServers:
    """The servers that are announced in ``directory``, which `keep_server` does.

    ``make`` returns the engine of an address, as `VLLMServer` does; a server that was restarted is
    another engine. ``takes_weights`` False: the servers read weights by themselves, so `sample_for`
    keeps none for them.
    """

    def __init__(
        self,
        directory: str | Path,
        make: Callable[[str], SamplingEngine],
        *,
        takes_weights: bool = True,
    ) -> None:
        self._folder, self._make = Path(directory) / _SERVERS, make
        self.takes_weights = takes_weights
        self._engines: dict[str, SamplingEngine] = {}

    def engines(self) -> Sequence[SamplingEngine]:
        """Return the engines of the servers that may be asked now."""
        there = {path.name: path for path in self._paths()}
        for name in self._engines.keys() - there.keys():
            del self._engines[name]
        for name, path in there.items():
            if name not in self._engines and (url := _read(path)):
                self._engines[name] = self._make(url)
        return list(self._engines.values())

    def _paths(self) -> list[Path]:
        """Return the files of living servers; delete the others."""
        found: list[Path] = []
        if not self._folder.is_dir():
            return found
        for path in sorted(self._folder.iterdir()):
            if path.name.startswith("."):
                continue
            if is_held(path):
                found.append(path)
            else:
                path.unlink(missing_ok=True)
        return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:  # withdrawn in this moment
        return ""
