"""The payloads of an island under way: one to the store at a time, a few from the other islands."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from holdfast.ckpt.errors import NotFoundError
from holdfast.elastic.islands.haul.line import PacedLines
from holdfast.elastic.sea.records import Part, Work

_AT_ONCE: Final = 4
"""Payloads that are fetched at the same time."""

_T = TypeVar("_T")


class Submit(Protocol):
    """Begins a transfer, and returns its outcome to come."""

    def __call__(self, transfer: Callable[[], _T], /) -> Future[_T]:
        """Begin ``transfer``."""


def at_once(transfer: Callable[[], _T], /) -> Future[_T]:
    """Carry a transfer out, in the calling thread."""
    future = Future[_T]()
    carry_out(transfer, future)
    return future


def on_thread(transfer: Callable[[], _T], /) -> Future[_T]:
    """Carry a transfer out on a thread of its own, which no exit of the process waits for."""
    future = Future[_T]()
    threading.Thread(
        target=carry_out, args=(transfer, future), name="islands-haul", daemon=True
    ).start()
    return future


def carry_out(transfer: Callable[[], _T], future: Future[_T]) -> None:
    """Carry a transfer out, and note its result or its error."""
    try:
        found = transfer()
    except Exception as error:  # noqa: BLE001 -- the one who asks for the outcome raises it
        future.set_exception(error)
    else:
        future.set_result(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A payload that is here.

    ``own``: it was made here. ``direct``: another island gave it, not the store.
    """

    data: bytes
    seconds: float = 0.0
    own: bool = False
    direct: bool = False


class PayloadFiles(Protocol):
    """The payloads in the store, as `holdfast.elastic.islands.mailbox.Mailbox` has them."""

    def publish(self, work: Work, payload: bytes) -> Work:
        """Publish a work with its payload; return the one that counts."""

    def payload(self, island: str, digest: str) -> bytes:
        """Return a payload. Raises ``NotFoundError`` if it was removed."""


class PayloadPeers(Protocol):
    """The other islands, as `holdfast.elastic.islands.haul.direct.Direct` reaches them."""

    def offer(self, digest: str, payload: bytes) -> None:
        """Let the others have a payload of this island."""

    def ask(self, part: Part, nbytes: int) -> bytes | None:
        """Return an island's payload of so many bytes, None if it does not give it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Haul:
    """The transfers for a merge: bytes of others' payloads, and the seconds of them together.

    ``direct_bytes`` are those that other islands gave, without the store.
    """

    fetched_bytes: int = 0
    seconds: float = 0.0
    direct_bytes: int = 0


class Freight:
    """The payloads of one island. `wake` is called, on any thread, when a transfer ends.

    Its methods may be called by two threads: the one that goes round, and the training.
    """

    def __init__(
        self,
        files: PayloadFiles,
        *,
        lines: PacedLines | None = None,
        peers: PayloadPeers | None = None,
        submit: Submit = at_once,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files, self._peers, self._submit, self._clock = files, peers, submit, clock
        self._lines = PacedLines() if lines is None else lines
        self._lock = threading.Lock()
        self._upload: Future[tuple[Work, float]] | None = None
        self._coming: dict[str, Future[Fetched]] = {}
        self.wake: Callable[[], None] = _sleep_on

    # -- to the store ----------------------------------------------------------------------------

    @property
    def is_sending(self) -> bool:
        """True from the begin of an upload until `publish` has told its outcome."""
        return self._upload is not None

    def publish(self, work: Work, payload: bytes) -> tuple[Work, float] | None:
        """Begin to publish a work, or return the one that counts, and the seconds that it took.

        None until then. Call it again with the same work; raises the errors of the store, and
        begins anew at the next call.
        """
        if self._upload is None:
            if self._peers is not None:
                self._peers.offer(work.digest, payload)
            self._upload = self._begin(lambda: self._published(work, payload))
        if not self._upload.done():
            return None
        upload, self._upload = self._upload, None
        return upload.result()

    def _published(self, work: Work, payload: bytes) -> tuple[Work, float]:
        began_s = self._clock()
        return self._files.publish(work, payload), self._clock() - began_s

    # -- from the others -------------------------------------------------------------------------

    def put(self, digest: str, payload: bytes) -> None:
        """Keep a payload of this island, which need not be fetched."""
        here = Future[Fetched]()
        here.set_result(Fetched(data=payload, own=True))
        with self._lock:
            self._coming[digest] = here

    def fetch(self, parts: Iterable[tuple[Part, int]]) -> None:
        """Begin to fetch the payloads that are not here, the first ones first, with their sizes."""
        for part, nbytes in parts:
            with self._lock:
                under_way = sum(not each.done() for each in self._coming.values())
                if under_way >= _AT_ONCE:
                    return
                if part.digest in self._coming:
                    continue
                begun = Future[Fetched]()  # so that no other thread begins it too
                self._coming[part.digest] = begun
            coming = self._begin(functools.partial(self._fetched, part, nbytes))
            with self._lock:
                if self._coming.get(part.digest) is begun:
                    self._coming[part.digest] = coming

    def take(self, parts: Sequence[Part]) -> list[bytes] | None:
        """Return the payloads of a merge, None while some are under way.

        Raises ``NotFoundError`` if one was removed, and the errors of the store; it is fetched anew
        after these.
        """
        self.fetch((part, -1) for part in parts)
        with self._lock:
            coming = [self._coming.get(part.digest) for part in parts]
        found = [each.result().data for each in coming if each is not None and self._ended(each)]
        return found if len(found) == len(parts) else None

    def haul(self, parts: Iterable[Part]) -> Haul:
        """Return the figures of the payloads of a merge that are here."""
        with self._lock:
            coming = [self._coming.get(part.digest) for part in parts]
        ended = [each for each in coming if each is not None and each.done()]
        here = [each.result() for each in ended if each.exception() is None]
        fetched = [each for each in here if not each.own]
        return Haul(
            fetched_bytes=sum(len(each.data) for each in fetched),
            seconds=sum(each.seconds for each in fetched),
            direct_bytes=sum(len(each.data) for each in fetched if each.direct),
        )

    def keep(self, digests: set[str]) -> None:
        """Release all other payloads."""
        with self._lock:
            self._coming = {k: each for k, each in self._coming.items() if k in digests}

    def release(self, digests: Iterable[str]) -> None:
        """Release payloads."""
        with self._lock:
            for digest in digests:
                self._coming.pop(digest, None)

    def check(self, *, named: set[str]) -> None:
        """Raise the error of a fetch that failed; it begins anew.

        One that found nothing, and that no merge has ``named``, is no error: its owner entered
        anew.
        """
        with self._lock:
            failed = {k: e for k, f in self._coming.items() if f.done() and (e := f.exception())}
            gone = {k for k, error in failed.items() if isinstance(error, NotFoundError)}
            for digest in failed.keys() - (gone & named):
                self._coming.pop(digest)
        for digest in failed.keys() - gone:
            raise failed[digest]

    # -- the end ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the transfers under way at their next piece."""
        self._lines.up.close()
        self._lines.down.close()

    def rest(self, timeout_s: float) -> bool:
        """Wait until all transfers have ended, after `stop`; return whether they have.

        Then the lines are free for others.
        """
        with self._lock:
            under_way: list[Future[Any]] = [*self._coming.values()]
        if self._upload is not None:
            under_way.append(self._upload)
        if wait(under_way, timeout_s).not_done:
            return False
        self._lines.up.open()
        self._lines.down.open()
        return True

    # -- inside ----------------------------------------------------------------------------------

    def _ended(self, coming: Future[Fetched]) -> bool:
        """Return whether a fetch has succeeded. Raises its error, after which it begins anew."""
        if not coming.done():
            return False
        if (error := coming.exception()) is not None:
            with self._lock:
                self._coming = {k: each for k, each in self._coming.items() if each is not coming}
            raise error
        return True

    def _begin(self, transfer: Callable[[], _T]) -> Future[_T]:
        begun = self._submit(transfer)
        begun.add_done_callback(lambda _: self.wake())
        return begun

    def _fetched(self, part: Part, nbytes: int) -> Fetched:
        """Return a payload, of its island if that gives it, else of the store."""
        began_s = self._clock()
        given = None
        if self._peers is not None and nbytes >= 0:
            given = self._peers.ask(part, nbytes)
        data = self._files.payload(part.island, part.digest) if given is None else given
        return Fetched(data=data, seconds=self._clock() - began_s, direct=given is not None)


def _sleep_on() -> None:
    """Stand for a thread that nobody need wake."""
