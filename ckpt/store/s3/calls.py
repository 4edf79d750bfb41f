"""Requests to one S3 server: retried after transient errors, within a deadline."""

from __future__ import annotations

import io
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, Final, TypeVar

import boto3
from botocore.config import Config

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.s3.config import S3Config, S3Timing
from holdfast.ckpt.store.s3.errors import FAILURES, OverdueError, is_transient, refusal, said

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_BLOCK_BYTES: Final = 256 << 10


class Deadline:
    """The time by which a request must have succeeded."""

    def __init__(self, timing: S3Timing, within_s: float) -> None:
        self._now, self._start_s, self._within_s = timing.now, timing.now(), within_s

    def spent_s(self) -> float:
        """Return the seconds since the first attempt began."""
        return self._now() - self._start_s

    def left_s(self) -> float:
        """Return the seconds left."""
        return self._within_s - self.spent_s()

    def check(self) -> None:
        """Raise ``OverdueError`` once there is no time left."""
        if self.left_s() <= 0:
            raise OverdueError(
                f"not complete within {self._within_s:g} s, though bytes were moving"
            )


class S3Connection:
    """A client of one server, with its threads; all threads of one process may share it."""

    def __init__(self, config: S3Config, timing: S3Timing | None = None) -> None:
        self.config, self.timing = config, timing or S3Timing()
        session = _session(config)
        self.client = _client(session, config, sign_bodies=True)
        """For requests and small bodies, which the signature covers."""
        self.sender = _client(session, config, sign_bodies=False)
        """For the bytes of files: the signature covers their MD5, and nothing is hashed twice."""
        self.pool = ThreadPoolExecutor(config.threads, thread_name_prefix="holdfast-s3")
        self.quoted_versions: dict[str, bool] = {}
        """Bucket → whether its server needs the versions in conditions quoted."""
        self.probing = threading.Lock()

    def send(self, request: Callable[[Deadline], _T], *, where: str, doing: str) -> _T:
        """Return the result of ``request``, calling it again after transient errors.

        Pauses have full jitter (Brooker, "Exponential Backoff And Jitter", AWS 2015). No attempt
        begins that could stall beyond the deadline. Raises ``NotFoundError`` and ``StoreError``.
        """
        config, timing = self.config, self.timing
        deadline = Deadline(timing, config.deadline_s)
        failures: list[str] = []  # one before may tell more than a last attempt that was cut off
        for failed in itertools.count(1):
            try:
                return request(deadline)
            except OverdueError as error:
                raise refusal(error, where=where, doing=doing) from error
            except FAILURES as error:
                if not is_transient(error):
                    raise refusal(error, where=where, doing=doing) from error
                longest_s = min(config.longest_pause_s, config.pause_s * 2 ** min(failed, 30))
                pause_s = timing.between(0, longest_s)
                others = [each for each in failures if each != said(error)]
                if deadline.left_s() < pause_s + config.stall_s:
                    before = f" (before that {others[-1]})" if others else ""
                    raise StoreError(
                        f"{where}: cannot {doing}: tried {failed} times in "
                        f"{deadline.spent_s():.1f} s, in the end {said(error)}{before}; check the "
                        "server and the network, then try again"
                    ) from error
                failures = [*others[-1:], said(error)]
                level = logging.WARNING if failed % 5 == 0 else logging.INFO
                _log.log(level, "%s: cannot %s yet: %s", where, doing, said(error))
            timing.sleep(pause_s)
        raise AssertionError("unreachable")

    def each(self, actions: Sequence[Callable[[], _T]]) -> list[_T]:
        """Run ``actions`` on the threads and return their results, in order.

        When one fails, its error is raised after the others have ended too, so that nothing touches
        their buffers afterwards.
        """
        if len(actions) == 1:
            return [actions[0]()]
        return settle([self.pool.submit(action) for action in actions])


def settle(futures: Sequence[Future[_T]], *, raising: bool = True) -> list[_T]:
    """Wait until all have ended and return their results; after a failure, no other one begins."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, return_when="FIRST_EXCEPTION")
        if any(not future.cancelled() and future.exception() for future in done):
            for future in pending:
                future.cancel()
            wait(pending)
            break
    ended = [future for future in futures if not future.cancelled()]
    if not raising:
        return []
    for future in ended:
        future.result()
    return [future.result() for future in ended]


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


def _client(session: Any, config: S3Config, *, sign_bodies: bool) -> Any:
    """Make a boto3 client that sends each request once: `S3Connection.send` does the retries.

    Newer checksum headers are not used: some servers store them unchecked, others refuse them as
    trailers. Every server checks MD5 and signature.
    """
    try:
        return session.client(
            "s3",
            endpoint_url=config.endpoint_url,
            region_name=session.region_name or ("us-east-1" if config.endpoint_url else None),
            config=Config(
                s3={
                    "addressing_style": "path" if config.endpoint_url else "auto",
                    "payload_signing_enabled": sign_bodies,
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
    """Buffers as the body of a request, sent without a copy; a slow send ends at the deadline."""

    def __init__(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        self._views, self._deadline = views, deadline
        self._nbytes = sum(view.nbytes for view in views)
        self._left = self._from_start()

    def __len__(self) -> int:
        return self._nbytes

    def _from_start(self) -> Iterable[memoryview]:
        for view in self._views:
            for at in range(0, view.nbytes, _BLOCK_BYTES):
                yield view[at : at + _BLOCK_BYTES]

    def read(self, size: int = -1) -> Any:
        """Return the next bytes as a view, in blocks of our own size; HTTP clients send it."""
        self._deadline.check()
        return next(iter(self._left), b"")

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
