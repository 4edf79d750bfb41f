"""Several engines that finish answers together: one that is lost hands its answers to the others.

Tokens are added to the samples in the caller's thread alone, and thereby logged, one by one. So an
answer goes on elsewhere after the last token that was added, and no token is sampled twice.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from holdfast.adapters.rl.engines.protocol import SampledToken, SamplingEngine, TokenPlace
from holdfast.adapters.rl.samples.sample import Sample
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.ckpt.errors import CkptError
from holdfast.elastic.errors import ConfigError, JobFailedError

_POLL_S: Final = 0.05
_ASK_S: Final = 0.05
_MOST_TOKENS: Final = 4096
"""Tokens that streams are ahead of the caller's thread."""


@dataclass(slots=True)
class _Work:
    """An answer that is not finished; ``since`` is the time of its last token or its first try.

    ``floor`` is the oldest version that its next token may be of.
    """

    answer: Sample
    since: float | None = None
    floor: int = field(init=False)

    def __post_init__(self) -> None:
        self.floor = self.answer.version


@dataclass(slots=True)
class _Attempt:
    """A stream of one engine for an answer."""

    work: _Work
    engine: int
    stopped: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Report:
    """A token of a stream, or its end, with the error if it was none of the answer."""

    attempt: _Attempt
    token: SampledToken | None = None
    error: Exception | None = None


class EnginePool:
    """Finishes samples on ``engines``, each of which gets as many as its capacity.

    ``pinned``: a sample is of the version it asks for, as in the modes ``SYNC`` and ``FIXED_LAG``.
    Otherwise the versions of its tokens may rise, as in ``BOUNDED``. An engine that failed is tried
    again after ``retry_s``. ``moved`` counts the answers that went on elsewhere or later.
    """

    def __init__(
        self,
        engines: Sequence[SamplingEngine],
        *,
        pinned: bool = True,
        wait_s: float = 120.0,
        retry_s: float = 0.5,
    ) -> None:
        if not engines:
            raise ConfigError("EnginePool([]): give one engine or more")
        self._engines, self._pinned = list(engines), pinned
        self._wait_s, self._retry_s = wait_s, retry_s
        self.moved = 0
        self._last_failure = "none"
        self._loaded: tuple[Mapping[str, Tensor], int] | None = None
        self._rests_until = [0.0] * len(self._engines)
        self._given: list[object] = [None] * len(self._engines)
        self._refused: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._locks = [threading.Lock() for _ in self._engines]

    @property
    def capacity(self) -> int:
        """Number of answers that all engines together sample at a time."""
        return sum(engine.capacity for engine in self._engines)

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Have every engine sample with these weights.

        One that cannot be reached gets them before it samples again, and so does one that failed
        later: it may have been restarted with older ones. The tensors must stay as they are until
        the answers are finished.
        """
        self._loaded = (weights, version)
        for number in range(len(self._engines)):
            try:
                self._renew(number)
            except CkptError as error:
                self._fail(number, error)

    def offer(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Have every engine sample with these weights soon, without waiting for it.

        Each loads them beside its streams, at the latest before its next answer. The tensors must
        stay as they are.
        """
        self._loaded = (weights, version)
        for number in range(len(self._engines)):
            threading.Thread(target=self._renew_beside, args=(number,), daemon=True).start()

    def finish(
        self, answers: Sequence[Sample], *, idle: Callable[[], object] | None = None
    ) -> None:
        """Finish all ``answers``.

        ``idle`` is called now and then while no token comes. Raises ``JobFailedError`` if an answer
        has got no token for ``wait_s``, in all its tries, and ``ConfigError`` for what no engine
        will do.
        """
        self._run(list(answers), idle=idle, more=None)

    def work(self, more: Callable[[int], Sequence[Sample]]) -> None:
        """Finish the answers that ``more`` gives, with the newest weights that were offered.

        ``more`` is called now and then, and with the number of answers that the engines have room
        for, which may be 0. It ends when ``more`` raises ``StopIteration``, and raises as `finish`.
        """
        self._run([], idle=None, more=more)

    def _run(
        self,
        answers: list[Sample],
        *,
        idle: Callable[[], object] | None,
        more: Callable[[int], Sequence[Sample]] | None,
    ) -> None:
        waiting = deque(_Work(each) for each in answers if not each.finished)
        idle_since = asked_s = time.monotonic()
        running: list[_Attempt] = []
        reports: queue.Queue[_Report] = queue.Queue(_MOST_TOKENS)
        try:
            while waiting or running or more is not None:
                if more is not None and (not running or time.monotonic() > asked_s + _ASK_S):
                    room = self.capacity - len(waiting) - len(running)
                    waiting += [_Work(each) for each in more(max(0, room)) if not each.finished]
                    idle_since = asked_s = time.monotonic()
                self._begin(waiting, running, reports)
                if not self._refused.empty():
                    raise self._refused.get()
                try:
                    report = reports.get(timeout=_POLL_S)
                except queue.Empty:
                    for attempt in [each for each in running if each.work.answer.finished]:
                        _end(attempt, running)
                    if idle is not None:
                        idle()
                    if not running and waiting:
                        self._check_patience(idle_since)
                    continue
                idle_since = time.monotonic()
                if report.attempt in running:
                    self._take(report, waiting, running)
        except StopIteration:
            return
        finally:
            for attempt in running:
                attempt.stopped.set()

    def _begin(
        self, waiting: deque[_Work], running: list[_Attempt], reports: queue.Queue[_Report]
    ) -> None:
        """Give waiting answers to the engines with room, the emptiest first."""
        now_s = time.monotonic()
        while waiting:
            loads = [0] * len(self._engines)
            for attempt in running:
                loads[attempt.engine] += 1
            free = [
                number
                for number, engine in enumerate(self._engines)
                if loads[number] < engine.capacity and self._rests_until[number] <= now_s
            ]
            if not free:
                return
            number = min(free, key=lambda each: loads[each] / self._engines[each].capacity)
            attempt = _Attempt(waiting.popleft(), number)
            running.append(attempt)
            if attempt.work.since is None:
                attempt.work.since = now_s
            answer = attempt.work.answer
            start = (answer.text, _place_of(answer))
            arguments = (start, attempt, reports)
            threading.Thread(target=self._stream, args=arguments, daemon=True).start()

    def _take(self, report: _Report, waiting: deque[_Work], running: list[_Attempt]) -> None:
        attempt, work = report.attempt, report.attempt.work
        if report.token is not None:
            if (said := self._add(report.token, work)) is None:
                if work.answer.finished:
                    _end(attempt, running)
                return
            report.error = CkptError(said)
        _end(attempt, running)
        if work.answer.finished:
            return
        if report.error is not None and not isinstance(report.error, CkptError):
            raise report.error
        self._fail(attempt.engine, report.error or "its stream ended too early")
        self.moved += 1
        waiting.append(work)
        self._check_patience(work.since)

    def _add(self, token: SampledToken, work: _Work) -> str | None:
        """Add a token to its sample, or return why it cannot be one of it."""
        answer = work.answer
        if answer.given_up:
            return None
        if self._pinned and token.version != answer.version:
            return f"a token of version {token.version} for a sample of version {answer.version}"
        if token.version < work.floor:
            return f"a token of version {token.version} after one of version {work.floor}"
        answer.version = work.floor = token.version
        answer.extend([token.token], [token.logprob])
        work.since = time.monotonic()
        return None

    def _fail(self, number: int, why: object) -> None:
        """Let an engine rest; it needs the weights again before it samples."""
        self._rests_until[number] = time.monotonic() + self._retry_s
        self._given[number], self._last_failure = None, str(why)

    def _renew(self, number: int) -> None:
        """Give an engine the newest weights, if it has others or has failed since it got them."""
        with self._locks[number]:
            while (loaded := self._loaded) is not None and self._given[number] is not loaded:
                weights, version = loaded
                self._engines[number].load(weights, version=version)
                self._given[number] = loaded

    def _renew_beside(self, number: int) -> None:
        try:
            self._renew(number)
        except CkptError as error:
            self._fail(number, error)
        except Exception as error:  # noqa: BLE001 - the caller's thread raises it
            self._refused.put(error)

    def _stream(
        self, start: tuple[Tokens, TokenPlace], attempt: _Attempt, reports: queue.Queue[_Report]
    ) -> None:
        """Hand on the tokens of one stream, until it ends or nobody wants them."""
        error: Exception | None = None
        try:
            self._renew(attempt.engine)
            tokens = self._engines[attempt.engine].generate(*start)
            for token in tokens:
                if not _put(_Report(attempt, token=token), reports):
                    tokens.close()
                    return
        except Exception as found:  # noqa: BLE001 - the caller's thread raises it
            error = found
        _put(_Report(attempt, error=error), reports)

    def _check_patience(self, since: float | None) -> None:
        if since is not None and time.monotonic() > since + self._wait_s:
            raise JobFailedError(
                f"an answer has got no token for {self._wait_s:g} s from any of "
                f"{len(self._engines)} engines (the last failure: {self._last_failure}); start "
                "engines, or give a longer wait_s"
            )


def _end(attempt: _Attempt, running: list[_Attempt]) -> None:
    attempt.stopped.set()
    running.remove(attempt)


def _place_of(answer: Sample) -> TokenPlace:
    return TokenPlace(
        seed=answer.seed, ordinal=answer.ordinal, sample=answer.sample, prompt=len(answer.prompt)
    )


def _put(report: _Report, reports: queue.Queue[_Report]) -> bool:
    """Put a report; return False if its stream is no longer wanted."""
    while not report.attempt.stopped.is_set():
        try:
            reports.put(report, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False
