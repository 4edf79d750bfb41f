"""Requests to one S3 server: retried after transient errors, within a deadline."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final, TypeVar

import boto3
from botocore.config import Config

from holdfast.ckpt.store.objects.limits import RequestTiming
from holdfast.ckpt.store.objects.retries import Deadline, Retrier
from holdfast.ckpt.store.objects.threads import each
from holdfast.ckpt.store.s3.config import S3Config
from holdfast.ckpt.store.s3.errors import FAILURES, FAULTS, refusal

_T = TypeVar("_T")
_BLOCK_BYTES: Final = 256 << 10
_PACED_BYTES: Final = 32 << 10


class S3Connection:
    """A client of one server, with its threads; all threads of one process may share it."""

    def __init__(self, config: S3Config, timing: RequestTiming | None = None) -> None:
        self.config, self._retrier = config, Retrier(config, FAULTS, timing)
        session = _session(config)
        self.client = _client(session, config)
        self.pool = ThreadPoolExecutor(config.threads, thread_name_prefix="holdfast-s3")
        self.quoted_versions: dict[str, bool] = {}
        """Bucket → whether its server needs the versions in conditions quoted."""
        self.probing = threading.Lock()

    def send(self, request: Callable[[Deadline], _T], *, where: str, doing: str) -> _T:
        """Return the result of ``request``, as `Retrier.send` does."""
        return self._retrier.send(request, where=where, doing=doing)

    def each(self, actions: Sequence[Callable[[], _T]]) -> list[_T]:
        """Run ``actions`` on the threads, as `holdfast.ckpt.store.objects.threads.each` does."""
        return each(self.pool, actions)


@lru_cache(maxsize=8)
def _connection(config: S3Config, process: int) -> S3Connection:
    return S3Connection(config)


def connect(config: S3Config) -> S3Connection:
    """Return this process's connection for ``config``; a forked child gets its own."""
    return _connection(config, os.getpid())


def _session(config: S3Config) -> Any:
    try:
        return boto3.session.Session(
            aws_access_key_id=config.access_key,
            aws_secret_access_key=config.secret_key,
            aws_session_token=config.session_token,
            region_name=config.region,
            profile_name=None if config.access_key else config.profile,
        )
    except FAILURES as error:
        raise refusal(error, where="s3://", doing="find the credentials for it") from error


def _client(session: Any, config: S3Config) -> Any:
    """Make a boto3 client that sends each request once: `Retrier` does the retries.

    Newer checksum headers are not used: some servers store them unchecked, others refuse them as
    trailers. The signature covers the SHA-256 of every body instead, which servers check
    too. Processors have instructions for it, so it takes half the time of an MD5.
    """
    try:
        return session.client(
            "s3",
            endpoint_url=config.endpoint_url,
            region_name=session.region_name or ("us-east-1" if config.endpoint_url else None),
            config=Config(
                s3={
                    "addressing_style": "path" if config.endpoint_url else "auto",
                    "payload_signing_enabled": True,
                },
                retries={"total_max_attempts": 1, "mode": "standard"},
                connect_timeout=config.connect_s,
                read_timeout=config.stall_s,
                max_pool_connections=max(32, config.threads * 2),
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                tcp_keepalive=True,
            ),
        )
    except FAILURES as error:
        place = config.endpoint_url or "the S3 server"
        raise refusal(error, where=place, doing="prepare requests to it") from error


class Body(io.RawIOBase):
    """Buffers as the body of a request, sent without a copy; a slow send ends at the deadline.

    ``pay`` gets the bytes of each piece as it is sent, and waits as long as the pace demands. The
    first reading is that of the signature, which sends nothing.
    """

    def __init__(
        self,
        views: Sequence[memoryview],
        deadline: Deadline,
        *,
        pay: Callable[[int], None] | None = None,
    ) -> None:
        self._views, self._deadline, self._pay = views, deadline, pay
        self._is_signed = False
        self._nbytes = sum(view.nbytes for view in views)
        self._left = self._from_start()

    def __len__(self) -> int:
        return self._nbytes

    def _from_start(self) -> Iterable[memoryview]:
        step = _BLOCK_BYTES if self._pay is None else _PACED_BYTES
        for view in self._views:
            for at in range(0, view.nbytes, step):
                yield view[at : at + step]

    def read(self, size: int = -1) -> Any:
        """Return the next bytes as a view, in blocks of our own size; HTTP clients send it."""
        self._deadline.check()
        piece = next(iter(self._left), memoryview(b""))
        if self._pay is not None and piece.nbytes and self._is_signed:
            self._pay(piece.nbytes)
        self._is_signed |= not piece.nbytes
        return piece if piece.nbytes else b""

    def seekable(self) -> bool:
        """Return True; only the start can be sought."""
        return True

    def tell(self) -> int:
        """Return 0: clients ask only before they send the body."""
        return 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go back to the start."""
        self._left = self._from_start()
        return 0
