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

from holdfast.ckpt.errors import CkptError, NotFoundError, StoreError
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.store.cloud.calls import CloudConnection, CloudTarget
from holdfast.ckpt.store.cloud.errors import FAILURES, is_transient, is_upload_gone, refusal, said
from holdfast.ckpt.store.cloud.read import CloudFile
from holdfast.ckpt.store.handover import Handover
from holdfast.ckpt.store.paced import PacedParts


def write(connection: CloudConnection, target: CloudTarget, parts: Iterable[Buffer]) -> int:
    """Publish a file made of ``parts``; return its size in bytes. Raises ``StoreError``."""
    part_bytes = connection.config.part_bytes
    if isinstance(parts, PacedParts):
        part_bytes = parts.part_bytes(part_bytes)
    source = _UploadSource(connection, target, parts)
    first = source.take(part_bytes)
    if source.nbytes < part_bytes:
        with connection.refusing(target.where, "write it"):
            obstore.put(connection.store, target.key, b"".join(first), use_multipart=False)
    else:
        _CloudUpload(connection, target, part_bytes=part_bytes).run(source, first)
    return source.nbytes


class _CloudUpload:
    """One upload in parts, sent by a thread: obstore must not be called where it pulls a part.

    So the source of the parts may read from such a store too.
    """

    def __init__(
        self, connection: CloudConnection, target: CloudTarget, *, part_bytes: int
    ) -> None:
        self._connection, self._target, self._part_bytes = connection, target, part_bytes
        self._began = self._ended = False
        self._doubt: BaseException | None = None
        """The failure of an upload that may be complete all the same."""

    def run(self, source: _UploadSource, first: list[memoryview]) -> None:
        """Send ``first`` and the rest of the source, and publish the file."""
        handover = Handover(self._consume)
        try:
            for part in source.rest(first):
                handover.push(part)
                del part
        except BaseException:
            handover.abandon()
            raise
        handover.finish()
        if self._doubt is not None and not _is_there(self._connection, self._target, source):
            raise self._failed(self._doubt) from self._doubt

    def _consume(self, pulled: Iterator[memoryview]) -> None:
        """Have obstore send the parts; begin again if it could not even begin."""
        self._connection.retrier.send(
            lambda _: self._send(pulled), where=self._target.where, doing="write it"
        )

    def _send(self, pulled: Iterator[memoryview]) -> None:
        config = self._connection.config
        try:
            obstore.put(
                self._connection.store,
                self._target.key,
                self._noticed(pulled),
                use_multipart=True,
                chunk_size=self._part_bytes,
                max_concurrency=config.threads,
            )
        except FAILURES as error:
            if self._ended and (is_upload_gone(error) or is_transient(error)):
                self._doubt = error
            elif self._began:
                raise self._failed(error) from error
            else:
                raise

    def _failed(self, error: BaseException) -> CkptError:
        where = self._target.where
        if is_upload_gone(error):
            return StoreError(
                f"{where}: the unfinished upload was completed or dropped by another program "
                f"({said(error)}), and the file in place is not this one; write it again, and let "
                "no other program write that name"
            )
        provider = self._connection.provider
        return refusal(error, where=where, doing="write it", provider=provider)

    def _noticed(self, pulled: Iterator[memoryview]) -> Iterator[memoryview]:
        for part in pulled:
            self._began = True
            yield part
            del part
        self._ended = True


def _is_there(connection: CloudConnection, target: CloudTarget, source: _UploadSource) -> bool:
    """Say whether the file in place has the bytes of ``source``: the last reply may be lost."""
    try:
        file = CloudFile(lambda: connection, target)
        return file.nbytes == source.nbytes and _checksum(file) == source.crc32c
    except (NotFoundError, StoreError):
        return False


def _checksum(file: CloudFile) -> int:
    room, found = bytearray(file.run_bytes), 0
    for at in range(0, file.nbytes, file.run_bytes):
        done = file.read_into([room], at)
        found = crc32c(memoryview(room)[:done], found)
    return found


class _UploadSource:
    """The parts of a file in turn, and size and checksum of those that were taken."""

    def __init__(
        self, connection: CloudConnection, target: CloudTarget, parts: Iterable[Buffer]
    ) -> None:
        self._parts, self._where = iter(parts), target.where
        self.nbytes = self.crc32c = 0
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
                self.crc32c = crc32c(view, self.crc32c)
                yield view
