"""Files written to a container: one request for a small one, parallel parts for others.

A file appears when its upload is completed, whole or not at all. obstore gives each upload parts of
its own, so writers of one name never mix. It cannot resume an upload that was cut off: the next
try begins anew, and the provider removes the rest (Azure after a week, Google by a rule of the
bucket).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import obstore
from typing_extensions import Buffer

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.cloud.calls import CloudConnection, CloudTarget
from holdfast.ckpt.store.handover import Handover


def write(connection: CloudConnection, target: CloudTarget, parts: Iterable[Buffer]) -> int:
    """Publish a file made of ``parts``; return its size in bytes. Raises ``StoreError``."""
    source = _Source(connection, target, parts)
    first = source.take(connection.config.part_bytes)
    if source.nbytes < connection.config.part_bytes:
        with connection.refusing(target.where, "write it"):
            obstore.put(connection.store, target.key, b"".join(first), use_multipart=False)
    else:
        _upload(connection, target, source.rest(first))
    return source.nbytes


def _upload(connection: CloudConnection, target: CloudTarget, parts: Iterator[memoryview]) -> None:
    """Send the parts by a thread: obstore must not be called where obstore pulls a part.

    So the source of the parts may read from such a store too.
    """

    def consume(pulled: Iterator[memoryview]) -> None:
        with connection.refusing(target.where, "write it"):
            obstore.put(
                connection.store,
                target.key,
                pulled,
                use_multipart=True,
                chunk_size=connection.config.part_bytes,
                max_concurrency=connection.config.threads,
            )

    handover = Handover(consume)
    try:
        for part in parts:
            handover.push(part)
            del part
    except BaseException:
        handover.abandon()
        raise
    handover.finish()


class _Source:
    """The parts of a file in turn, and the bytes that were taken."""

    def __init__(
        self, connection: CloudConnection, target: CloudTarget, parts: Iterable[Buffer]
    ) -> None:
        self._parts, self._where, self.nbytes = iter(parts), target.where, 0
        self._most_bytes = connection.provider.most_parts * connection.config.part_bytes

    def take(self, nbytes: int) -> list[memoryview]:
        """Return parts until ``nbytes`` are reached; fewer only at the end."""
        found: list[memoryview] = []
        for view in self._views():
            found.append(view)
            if self.nbytes >= nbytes:
                break
        return found

    def rest(self, first: list[memoryview]) -> Iterator[memoryview]:
        """Yield ``first`` and all that follows; keep no part that was yielded."""
        first.reverse()
        while first:
            yield first.pop()
        yield from self._views()

    def _views(self) -> Iterator[memoryview]:
        for part in self._parts:
            view = memoryview(part).cast("B")
            self.nbytes += view.nbytes
            if self.nbytes > self._most_bytes:
                raise StoreError(
                    f"{self._where}: more than {self._most_bytes} bytes, the most in parts of the "
                    "configured size; save with more writers, or configure larger parts"
                )
            if view.nbytes:
                yield view
