"""Uploads of files to a bucket: one request for a small file, parallel parts for others.

A file appears when its upload is completed, whole or not at all. A writer resumes an upload that a
killed writer left under the same key: parts with the right size and MD5 are not sent again. To
resume the upload of a living writer is harmless. An upload is completed with the tag of every part,
so the writer that completes it gets its own bytes or an error; the other one finds the very same
file in place, or raises an error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from hashlib import md5
from typing import Final

from botocore.exceptions import ClientError
from typing_extensions import Buffer

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.objects.retries import Deadline
from holdfast.ckpt.store.objects.threads import settle
from holdfast.ckpt.store.paced import PacedParts
from holdfast.ckpt.store.s3.calls import Body, S3Connection
from holdfast.ckpt.store.s3.config import S3Config
from holdfast.ckpt.store.s3.errors import code_of, is_missing
from holdfast.ckpt.store.s3.unfinished import UploadTarget, abort, parts_of, unfinished

_log = logging.getLogger(__name__)

_MOST_PARTS: Final = 10_000
Views = list[memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class _UploadPart:
    number: int
    nbytes: int
    tag: str


def write(connection: S3Connection, target: UploadTarget, parts: Iterable[Buffer]) -> int:
    """Publish a file made of ``parts``; return its size in bytes.

    Raises ``StoreError``; the parts that arrived are then kept for the next try. When ``parts``
    raises, nothing is kept.
    """
    config = connection.config
    if isinstance(parts, PacedParts):
        target = replace(target, pay=parts.pay)
        config = replace(config, part_bytes=parts.part_bytes(config.part_bytes))
        parts = [parts.whole]
    pieces = _pieces(parts, config)
    first = next(pieces, [])
    if (nbytes := _nbytes(first)) < config.nbytes_of_part(1):
        put(connection, target, first)
        return nbytes
    return _Upload(connection, target).run(first, pieces)


def put(connection: S3Connection, target: UploadTarget, views: Views) -> str:
    """Publish a small file in one request; return its version."""
    return connection.send(
        lambda deadline: put_once(connection, target, views, deadline),
        where=target.where,
        doing="write it",
    )


def put_once(
    connection: S3Connection,
    target: UploadTarget,
    views: Views,
    deadline: Deadline,
    **condition: str,
) -> str:
    """Like `put`, in one attempt: raises the errors of boto3. The signature covers the bytes."""
    body = _body(target, views, deadline)
    reply = connection.client.put_object(
        **target.address,
        Body=body,
        ContentLength=len(body),
        **condition,
    )
    return str(reply["ETag"]).strip('"')


def _body(target: UploadTarget, views: Views, deadline: Deadline) -> Body:
    """Return the body of one attempt; one that nobody wants any more ends here."""
    if target.pay is not None:
        target.pay(0)  # boto3 would try again after an error while it sends
    return Body(views, deadline, pay=target.pay)


def _nbytes(views: Views) -> int:
    return sum(view.nbytes for view in views)


def _md5(views: Views) -> str:
    """Return the MD5, which is the server's tag of a part."""
    digest = md5(usedforsecurity=False)
    for view in views:
        digest.update(view)
    return digest.hexdigest()


def _pieces(parts: Iterable[Buffer], config: S3Config) -> Iterator[Views]:
    """Group ``parts`` into the parts of an upload, cut where necessary, without copying.

    The cuts depend on the configuration alone, so that an upload can be resumed.
    """
    number, piece, room = 1, Views(), config.nbytes_of_part(1)
    for part in parts:
        view = memoryview(part).cast("B")
        while view.nbytes >= room:
            yield [*piece, view[:room]]
            view, piece, number = view[room:], [], number + 1
            room = config.nbytes_of_part(number)
        if view.nbytes:
            piece.append(view)
            room -= view.nbytes
    if piece:
        yield piece


def _tag_of(parts: list[_UploadPart]) -> str:
    """Return the tag of a completed upload: the MD5 of its parts' MD5s, and their number."""
    try:
        digests = b"".join(bytes.fromhex(part.tag) for part in parts)
    except ValueError:  # the server has tags of its own, for example with encryption
        return "unknown"
    return f"{md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"


class _Upload:
    """One multipart upload."""

    def __init__(self, connection: S3Connection, target: UploadTarget) -> None:
        self._connection, self._target = connection, target
        at_once = connection.config.threads if target.pay is None else 1
        self._window = threading.BoundedSemaphore(at_once)
        self._gone = threading.Event()
        self._failed = threading.Event()
        self._id, self._there = "", dict[int, tuple[str, int]]()

    def run(self, first: Views, pieces: Iterator[Views]) -> int:
        """Send all pieces, publish the file, return its size."""
        taken_up = self._taken_up()
        self._id = taken_up or self._created()
        futures: list[Future[_UploadPart]] = []
        try:
            self._submit(first, futures)
            first = []
            while not self._failed.is_set() and (piece := next(pieces, None)):
                self._submit(piece, futures)
                del piece
        except BaseException:  # the source broke: this upload will not be resumed
            self._failed.set()
            settle(futures, raising=False)
            if taken_up is None:
                abort(self._connection, self._target, self._id)
            raise
        sent = settle(futures)
        self._complete(sent)
        return sum(part.nbytes for part in sent)

    def _submit(self, piece: Views, futures: list[Future[_UploadPart]]) -> None:
        """Hand a piece to the threads, once fewer pieces than threads are in flight."""
        number = len(futures) + 1
        if number > _MOST_PARTS:
            raise StoreError(
                f"{self._target.where}: more than {_MOST_PARTS} parts, which no S3 server takes; "
                "save with more writers, or configure larger parts"
            )
        self._window.acquire()
        futures.append(self._connection.pool.submit(self._send, number, piece))

    def _send(self, number: int, views: Views) -> _UploadPart:
        """Send a part, unless the upload has it already."""
        try:
            nbytes = _nbytes(views)
            tag, size = self._there.get(number, ("", -1))
            is_there = size == nbytes and tag == _md5(views)
            if not is_there and not self._failed.is_set():
                tag = self._connection.send(
                    lambda deadline: self._upload_part(number, views, deadline),
                    where=self._target.where,
                    doing=f"write part {number} of it",
                )
            return _UploadPart(number=number, nbytes=nbytes, tag=tag)
        except BaseException:
            self._failed.set()
            raise
        finally:
            views.clear()
            self._window.release()

    def _upload_part(self, number: int, views: Views, deadline: Deadline) -> str:
        """Send a part; return the server's tag for it."""
        if self._gone.is_set():
            return _md5(views)
        body = _body(self._target, views, deadline)
        try:
            reply = self._connection.client.upload_part(
                **self._target.address,
                UploadId=self._id,
                PartNumber=number,
                Body=body,
                ContentLength=len(body),
            )
        except ClientError as error:
            if code_of(error) != "NoSuchUpload":
                raise
            self._gone.set()  # completed by another writer, or swept: checked at the end
            return _md5(views)
        return str(reply["ETag"]).strip('"')

    def _complete(self, parts: list[_UploadPart]) -> None:
        """Publish the file. After a lost reply, the file in place decides."""

        def request(deadline: Deadline) -> None:
            if self._gone.is_set():
                return self._must_be_there(parts)
            try:
                self._connection.client.complete_multipart_upload(
                    **self._target.address, UploadId=self._id, MultipartUpload={"Parts": listed}
                )
            except ClientError as error:
                if code_of(error) not in ("NoSuchUpload", "InvalidPart", "404"):
                    raise
                return self._must_be_there(parts)

        listed = [{"PartNumber": part.number, "ETag": part.tag} for part in parts]
        self._connection.send(request, where=self._target.where, doing="complete it")

    def _must_be_there(self, parts: list[_UploadPart]) -> None:
        """Raise ``StoreError`` unless the file in place has the written bytes."""
        wanted = (_tag_of(parts), sum(part.nbytes for part in parts))
        try:
            head = self._connection.client.head_object(**self._target.address)
        except ClientError as error:
            if not is_missing(error):
                raise
            found = "nothing"
        else:
            if (head["ETag"].strip('"'), head["ContentLength"]) == wanted:
                return
            found = f"{head['ContentLength']} bytes, ETag {head['ETag']}"
        raise StoreError(
            f"{self._target.where}: the unfinished upload was completed or removed by another "
            f"program, and in its place is {found}, not {wanted[1]} bytes with ETag {wanted[0]}; "
            "write it again, and let no other program write that name"
        )

    def _created(self) -> str:
        def request(deadline: Deadline) -> str:
            reply = self._connection.client.create_multipart_upload(**self._target.address)
            return str(reply["UploadId"])

        return self._connection.send(request, where=self._target.where, doing="begin to write it")

    def _taken_up(self) -> str | None:
        """Return the newest upload left for this key, and record its parts."""
        try:
            found = unfinished(self._connection, self._target)
            there = [upload for upload in found if upload.target.key == self._target.key]
            if not there:
                return None
            newest = max(there, key=lambda upload: upload.began)
            self._there = {
                part["PartNumber"]: (part["ETag"].strip('"'), part["Size"])
                for part in parts_of(self._connection, newest)
            }
        except StoreError as error:
            _log.info("%s: starting anew: %s", self._target.where, error)
            return None
        return newest.upload_id
