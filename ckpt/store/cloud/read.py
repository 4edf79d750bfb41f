"""Objects read in ranges, several at once; obstore resumes a range that was cut off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import obstore
from obstore.exceptions import PreconditionError
from typing_extensions import Buffer

from holdfast.ckpt.errors import NotFoundError, StoreError
from holdfast.ckpt.store.cloud.calls import CloudConnection, CloudTarget
from holdfast.ckpt.store.cloud.errors import FAILURES, is_missing, status_of
from holdfast.ckpt.store.objects.ranges import Sink, Views, ranges
from holdfast.ckpt.store.objects.threads import each
from holdfast.ckpt.store.regular import check_size

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta

_BLOCK_BYTES: Final = 256 << 10
Connect = Callable[[], CloudConnection]


def fetch(
    connection: CloudConnection, target: CloudTarget, *, most_bytes: int | None = None
) -> tuple[bytes, str]:
    """Return an object's bytes and its version."""
    with connection.refusing(target.where, "read it"):
        return fetch_once(connection, target, most_bytes=most_bytes)


def fetch_once(
    connection: CloudConnection, target: CloudTarget, *, most_bytes: int | None = None
) -> tuple[bytes, str]:
    """Like `fetch`, but raises the errors of obstore."""
    reply = obstore.get(connection.store, target.key)
    check_size(target.where, reply.meta["size"], most_bytes=most_bytes)
    data = bytes(reply.bytes())
    if len(data) != reply.meta["size"]:
        raise _short(target, len(data), reply.meta["size"])
    return data, version_of(connection, target, reply.meta)


def version_of(connection: CloudConnection, target: CloudTarget, meta: ObjectMeta) -> str:
    """Return the mark of an object's version. Raises ``StoreError`` for a server without it."""
    found = meta.get(connection.provider.version_key)
    if not found:
        raise StoreError(
            f"{target.where}: the server names no version of it, without which nothing can be "
            "committed; use another server"
        )
    return str(found)


class CloudFile:
    """An object at the version that was opened; reads fail once it is replaced or removed."""

    run_bytes = 16 << 20

    def __init__(self, connect: Connect, target: CloudTarget) -> None:
        self._connect, self._target = connect, target
        connection = connect()
        with connection.refusing(target.where, "open it for reading"):
            meta = obstore.head(connection.store, target.key)
        self.nbytes = meta["size"]
        self._version = version_of(connection, target, meta)

    def read_into(self, buffers: Sequence[Buffer], at: int) -> int:
        """Fill ``buffers`` from offset ``at``; return the bytes read.

        Raises ``NotFoundError`` when another object replaced the opened one.
        """
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        wanted = min(sum(view.nbytes for view in views), max(0, self.nbytes - at))
        if not wanted:
            return 0
        connection = self._connect()
        each(
            connection.pool,
            [
                partial(self._fill, connection, found, at + start)
                for start, found in ranges(views, wanted, threads=connection.config.threads)
            ],
        )
        return wanted

    def close(self) -> None:
        """Do nothing: connections belong to the store."""

    def _fill(self, connection: CloudConnection, views: Views, at: int) -> None:
        sink = Sink(views)
        end = at + sink.nbytes
        with connection.refusing(self._target.where, f"read bytes {at} to {end} of it"):
            reply = self._range(connection, at, end)
            for block in reply.stream(min_chunk_size=_BLOCK_BYTES):
                sink.take(memoryview(block)[: sink.nbytes - sink.done])
        if sink.done != sink.nbytes:
            raise _short(self._target, sink.done, sink.nbytes)

    def _range(self, connection: CloudConnection, at: int, end: int) -> GetResult:
        """Request the bytes from ``at`` to before ``end`` of the very object that was opened."""
        options: GetOptions = {"range": (at, end)}
        if connection.provider.version_key == "version":
            options["version"] = self._version
        else:
            options["if_match"] = self._version
        try:
            reply = obstore.get(connection.store, self._target.key, options=options)
        except (PreconditionError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and not is_missing(error):
                raise
            raise self._replaced() from error
        except FAILURES as error:
            if status_of(error) != 416:
                raise
            raise self._replaced() from error
        if version_of(connection, self._target, reply.meta) != self._version:
            raise self._replaced()
        if tuple(reply.range) != (at, end) or reply.meta["size"] != self.nbytes:
            raise StoreError(
                f"{self._target.where}: asked for bytes {at} to {end} of {self.nbytes}, the server "
                f"sent {reply.range} of {reply.meta['size']}; use a server with ranged reads"
            )
        return reply

    def _replaced(self) -> NotFoundError:
        return NotFoundError(
            f"{self._target.where}: was replaced or removed since it was opened; open it again"
        )


def _short(target: CloudTarget, found: int, wanted: int) -> StoreError:
    return StoreError(
        f"{target.where}: the reply ended after {found} of {wanted} bytes; check the network, then "
        "try again"
    )
