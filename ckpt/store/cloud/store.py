"""Checkpoints in Google Cloud Storage and Azure Blob Storage, by obstore.

obstore sends the requests and the parts of uploads, signs them, and tries them again. This module
adds the rest of a `Store`: a read stays with the object that was opened, the effect of a lost reply
is read back, and small files are replaced on a condition, after the server proved that it obeys
conditions. A version is the object's generation (Google) or ETag (Azure).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import Final

import obstore
from typing_extensions import Buffer

from holdfast.ckpt.errors import NotFoundError, StoreError
from holdfast.ckpt.store.base import SMALL_FILE_BYTES, Unpublished
from holdfast.ckpt.store.cloud.calls import CloudConnection, CloudTarget, connect
from holdfast.ckpt.store.cloud.conditions import PROBE, replace
from holdfast.ckpt.store.cloud.config import CloudConfig
from holdfast.ckpt.store.cloud.read import CloudFile, fetch
from holdfast.ckpt.store.cloud.write import write
from holdfast.ckpt.store.objects.threads import each

_URL: Final = re.compile(r"([a-z]+)://([^/?#]+)(?:/(.*))?")
_AT_ONCE: Final = 1000


class CloudStore:
    """The files below a prefix of a container or bucket. ``root`` is ``gs://…`` or ``az://…``."""

    def __init__(self, root: str, config: CloudConfig) -> None:
        scheme = config.provider.scheme
        match = _URL.fullmatch(f"{scheme}{root[len(scheme) :]}")
        if match is None or match[1] != scheme:
            example = config.provider.example()
            raise StoreError(f"{root}: not an address of {scheme}://; write {example}")
        self._container = match[2]
        self._prefix = (match[3] or "").strip("/")
        self.root = f"{scheme}://{self._container}/{self._prefix}".rstrip("/")
        self._config = config
        self._connect()  # raises now if the configuration is wrong

    def _connect(self) -> CloudConnection:
        return connect(self._container, self._config)

    def __repr__(self) -> str:
        return f"CloudStore({self.root!r})"

    def where(self, name: str) -> str:
        """Return the file's address."""
        return f"{self.root}/{name}" if name else self.root

    def _file(self, name: str) -> CloudTarget:
        return CloudTarget(key=f"{self._prefix}/{name}".strip("/"), where=self.where(name))

    def names(self, prefix: str) -> list[str]:
        """Return the names directly below the folder ``prefix``, sorted; none if it is absent."""
        connection, folder = self._connect(), self._file(prefix)
        with connection.refusing(f"{folder.where}/", "list it"):
            found = obstore.list_with_delimiter(connection.store, folder.key or None)
        keys = [*found["common_prefixes"], *(meta["path"] for meta in found["objects"])]
        below = f"{folder.key}/" if folder.key else ""
        names = {key.removeprefix(below).rstrip("/") for key in keys}
        return sorted(name for name in names if name and not name.startswith(PROBE))

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, None when it does not exist."""
        connection, target = self._connect(), self._file(name)
        try:
            with connection.refusing(target.where, "look at it"):
                return obstore.head(connection.store, target.key)["size"]
        except NotFoundError:
            return None

    def read(self, name: str, *, most_bytes: int = SMALL_FILE_BYTES) -> bytes:
        """Return a small file's bytes."""
        return fetch(self._connect(), self._file(name), most_bytes=most_bytes)[0]

    def open(self, name: str) -> CloudFile:
        """Open a file for ranged reads."""
        return CloudFile(self._connect, self._file(name))

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """Write a file from ``parts``, replacing any old one; return its size in bytes."""
        return write(self._connect(), self._file(name), parts)

    def fetch(self, name: str) -> tuple[bytes, str]:
        """Return a small file's bytes and their version."""
        return fetch(self._connect(), self._file(name), most_bytes=SMALL_FILE_BYTES)

    def replace(self, name: str, data: bytes, *, expected: str | None) -> bool:
        """Publish a small file if its version is ``expected``; say whether it was published.

        A racing writer of the very same bytes counts as this one. Raises ``StoreError`` for a
        server that ignores conditions.
        """
        return replace(self._connect(), self._file(name), data, expected=expected)

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""
        connection, left = self._connect(), iter(names)
        while batch := [self._file(name) for name in islice(left, _AT_ONCE)]:
            each(connection.pool, [partial(_delete, connection, target) for target in batch])

    def remove(self, folder: str) -> None:
        """Do nothing: a folder exists as long as an object is in it."""

    def sweep(self, folder: str) -> None:
        """Do nothing: obstore does not list unfinished uploads, and the provider removes them."""

    def unpublished(self, folder: str) -> list[Unpublished]:
        """Return nothing: obstore does not list unfinished uploads."""
        return []


def _delete(connection: CloudConnection, target: CloudTarget) -> None:
    with contextlib.suppress(NotFoundError):
        connection.retrier.send(
            lambda _: obstore.delete(connection.store, target.key),
            where=target.where,
            doing="remove it",
        )
