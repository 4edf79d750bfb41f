"""Several engines that finish answers together: one that is lost hands its answers to the others.

Tokens are added to the samples in the caller's thread alone, and thereby logged: those that came
while the log was waited for, together. So an answer goes on elsewhere after the last token that was
added, and no token is sampled twice.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import operator
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from torch import Tensor

from holdfast.adapters.rl.engines.choice import (
    AnswerView,
    EngineView,
    RunningView,
    choose,
    relief,
)
from holdfast.adapters.rl.engines.protocol import SampledToken, SamplingEngine
from holdfast.adapters.rl.engines.seats import EngineSeat, EngineSource, Weights
from holdfast.adapters.rl.engines.streams import POLL_S, Attempt, PoolWork, Report, stream
from holdfast.adapters.rl.samples.sample import Sample, logged_together
from holdfast.ckpt.errors import CkptError
from holdfast.elastic.errors import ConfigError, JobFailedError

_ASK_S: Final = 0.05
_LOOK_S: Final = 0.2
_LEAVE_S: Final = 1.0
_MOST_TOKENS: Final = 4096
"""Reports of tokens that streams are ahead of the caller's thread."""

_version = operator.attrgetter("version")

_MOST_TOGETHER: Final = 256
"""Reports that share a record of the log, and its wait."""


class EnginePool:
    """Finishes samples on ``engines``, each of which gets as many as its capacity.

    They are a sequence, or a source of engines that come and go, such as `AnnouncedServers`.
    ``pinned``: a sample is of the version it asks for, as in the modes ``SYNC`` and ``FIXED_LAG``.
    Otherwise the versions of its tokens may rise, as in ``BOUNDED``. An engine that failed is tried
    again after ``retry_s``. ``moved`` counts the answers that went on elsewhere or later.
    """

    def __init__(
        self,
        engines: Sequence[SamplingEngine] | EngineSource,
        *,
        pinned: bool = True,
        wait_s: float = 120.0,
        retry_s: float = 0.5,
    ) -> None:
        self._source: EngineSource | None = None
        if isinstance(engines, Sequence):
            if not engines:
                raise ConfigError("EnginePool([]): give one engine or more")
            self._seats = [EngineSeat(each) for each in engines]
        else:
            self._source, self._seats = engines, []
        self._pinned, self._wait_s, self._retry_s = pinned, wait_s, retry_s
        self.moved = 0
        self._last_failure = "none"
        self._loaded: Weights | None = None
        self._refused: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._looked_s = -_LOOK_S
        self._follow()

    @property
    def capacity(self) -> int:
        """Number of answers that all engines together sample at a time."""
        return sum(seat.engine.capacity for seat in self._seats if not seat.is_leaving)

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Have every engine sample with these weights.

        One that cannot be reached gets them before it samples again, and so does one that failed
        later: it may have been restarted with older ones. The tensors must stay as they are until
        the answers are finished.
        """
        self._loaded = (weights, version)
        self._follow()
        for seat in self._seats:
            seat.loading()
            try:
                seat.renew(self._newest)
            except CkptError as error:
                self._fail(seat, error)

    def offer(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Have every engine sample with these weights soon, without waiting for it.

        Each loads them beside its streams, at the latest before its next answer. The tensors must
        stay as they are.
        """
        self._loaded = (weights, version)
        self._follow()
        for seat in self._seats:
            seat.loading()
            self._begin_renewing(seat)

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
        for, which may be 0. It ends when ``more`` raises ``StopIteration``, and raises as `finish`;
        also if there is no engine at all for ``wait_s``.
        """
        self._run([], idle=None, more=more)

    def _run(
        self,
        answers: list[Sample],
        *,
        idle: Callable[[], object] | None,
        more: Callable[[int], Sequence[Sample]] | None,
    ) -> None:
        waiting = [PoolWork(each) for each in answers if not each.finished]
        idle_since = asked_s = roomy_s = time.monotonic()
        running: list[Attempt] = []
        reports: queue.Queue[Report] = queue.Queue(_MOST_TOKENS)
        try:
            while waiting or running or more is not None:
                self._look_around(waiting, running)
                if more is not None and (not running or time.monotonic() > asked_s + _ASK_S):
                    room = self.capacity - len(waiting) - len(running)
                    waiting += [PoolWork(each) for each in more(max(0, room)) if not each.finished]
                    idle_since = asked_s = time.monotonic()
                    roomy_s = asked_s if self._seats else roomy_s
                    self._check_patience(roomy_s)
                self._begin(waiting, running, reports)
                if not self._refused.empty():
                    raise self._refused.get()
                try:
                    report = reports.get(timeout=POLL_S)
                except queue.Empty:
                    for attempt in [each for each in running if each.work.answer.finished]:
                        _end(attempt, running)
                    if idle is not None:
                        idle()
                    if not running and waiting:
                        self._check_patience(idle_since)
                    continue
                idle_since = time.monotonic()
                found = [report, *_there(reports)]
                with logged_together(each.attempt.work.answer for each in found):
                    for report in found:
                        if report.attempt in running:
                            self._take(report, waiting, running)
        except StopIteration:
            return
        finally:
            for attempt in list(running):
                _end(attempt, running)

    # -- engines that come and go ----------------------------------------------------------------

    def _follow(self) -> None:
        """Take in the engines that came; those that went get no more answers."""
        if self._source is None:
            return
        self._looked_s, there = time.monotonic(), self._source.engines()
        for seat in self._seats:
            seat.is_leaving = not any(seat.engine is each for each in there)
        self._seats = [each for each in self._seats if not each.is_leaving or each.running]
        known = [each.engine for each in self._seats]
        for engine in there:
            if not any(engine is each for each in known):
                self._seats.append(EngineSeat(engine))
                if self._loaded is not None:
                    self._begin_renewing(self._seats[-1])

    def _look_around(self, waiting: list[PoolWork], running: list[Attempt]) -> None:
        """Move the answers of engines that leave or are slow, now and then."""
        now_s = time.monotonic()
        if now_s < self._looked_s + _LOOK_S:
            return
        self._looked_s = now_s
        self._follow()
        leaving = [each for each in running if each.seat.is_leaving]
        if not waiting:
            leaving += self._relieved(running, now_s=now_s)
        for attempt in leaving:
            if attempt.leave_by_s is None:
                attempt.leave_by_s = now_s + _LEAVE_S
                attempt.leaving.set()  # it ends after its next tokens, so that none is lost
        for attempt in list(running):
            if attempt.leave_by_s is not None and now_s > attempt.leave_by_s:
                _end(attempt, running)
                self._move(attempt.work, waiting)

    def _relieved(self, running: Sequence[Attempt], *, now_s: float) -> list[Attempt]:
        """Return the streams that should leave slow engines."""
        if len(self._seats) < 2:
            return []
        numbers = {id(seat): number for number, seat in enumerate(self._seats)}
        there = [
            RunningView(
                engine=numbers[id(each.seat)], tokens=each.work.tokens, since_s=now_s - each.begun_s
            )
            for each in running
        ]
        found = relief(self._views(running, now_s=now_s), there)
        return [running[number] for number, _ in found]

    def _views(self, running: Sequence[Attempt], *, now_s: float) -> list[EngineView]:
        silent_s: dict[int, float] = {}
        for each in running:
            if each.heard_s is not None:
                known_s = silent_s.get(id(each.seat), now_s)
                silent_s[id(each.seat)] = min(known_s, now_s - each.heard_s)
        return [
            seat.view(now_s=now_s, silent_s=silent_s.get(id(seat), 0.0)) for seat in self._seats
        ]

    # -- answers ---------------------------------------------------------------------------------

    def _begin(
        self, waiting: list[PoolWork], running: list[Attempt], reports: queue.Queue[Report]
    ) -> None:
        """Give waiting answers to the engines with room (see `choice`)."""
        if not waiting:
            return
        now_s = time.monotonic()
        views = self._views(running, now_s=now_s)
        room = sum(each.room for each in views)
        if not room:
            return
        first = heapq.nsmallest(room, waiting, key=lambda each: -each.tokens)
        asked = [
            AnswerView(
                tokens=each.tokens,
                cached={n: seat.cached(each.answer) for n, seat in enumerate(self._seats)},
            )
            for each in first
        ]
        for number, engine, _ in choose(views, asked):
            work, seat = first[number], self._seats[engine]
            waiting.remove(work)
            attempt = Attempt(work, work.answer.text, seat, begun_s=now_s)
            running.append(attempt)
            seat.began(work.answer)
            if work.since is None:
                work.since = now_s
            arguments = (attempt, reports, self._newest)
            threading.Thread(target=stream, args=arguments, daemon=True).start()

    def _take(self, report: Report, waiting: list[PoolWork], running: list[Attempt]) -> None:
        attempt, work = report.attempt, report.attempt.work
        if report.tokens:
            if (said := self._add(report.tokens, attempt)) is None:
                if work.answer.finished:
                    _end(attempt, running)
                return
            report.error = CkptError(said)
        _end(attempt, running)
        if work.answer.finished:
            return
        if report.error is not None and not isinstance(report.error, CkptError):
            raise report.error
        if report.error is not None or attempt.leave_by_s is None:
            self._fail(attempt.seat, report.error or "its stream ended too early")
        self._move(work, waiting)

    def _move(self, work: PoolWork, waiting: list[PoolWork]) -> None:
        self.moved += 1
        waiting.append(work)
        self._check_patience(work.since)

    def _add(self, tokens: Sequence[SampledToken], attempt: Attempt) -> str | None:
        """Add tokens to their sample, or return why they cannot be of it."""
        work, answer = attempt.work, attempt.work.answer
        if answer.given_up:
            return None
        for version, run in itertools.groupby(tokens, key=_version):
            if self._pinned and version != answer.version:
                return f"a token of version {version} for a sample of version {answer.version}"
            if version < work.floor:
                return f"a token of version {version} after one of version {work.floor}"
            answer.version = work.floor = version
            ids, logprobs, _ = zip(*run, strict=True)
            answer.extend(ids, logprobs)
            work.tokens += len(ids)
        now_s = work.since = time.monotonic()
        pause_s = None if attempt.heard_s is None else (now_s - attempt.heard_s) / len(tokens)
        attempt.seat.heard(answer, tokens=work.tokens, pause_s=pause_s, now_s=now_s)
        attempt.heard_s = now_s
        return None

    # -- engines ---------------------------------------------------------------------------------

    def _newest(self) -> Weights | None:
        return self._loaded

    def _fail(self, seat: EngineSeat, why: object) -> None:
        """Let an engine rest; it needs the weights again before it samples."""
        seat.failed(until_s=time.monotonic() + self._retry_s)
        self._last_failure = str(why)

    def _begin_renewing(self, seat: EngineSeat) -> None:
        threading.Thread(target=self._renew_beside, args=(seat,), daemon=True).start()

    def _renew_beside(self, seat: EngineSeat) -> None:
        try:
            seat.renew(self._newest)
        except CkptError as error:
            self._fail(seat, error)
        except Exception as error:  # noqa: BLE001 - the caller's thread raises it
            self._refused.put(error)

    def _check_patience(self, since: float | None) -> None:
        if since is None or time.monotonic() <= since + self._wait_s:
            return
        if not self._seats:
            raise JobFailedError(
                f"there is no engine for {self._wait_s:g} s: start servers, or give a longer wait_s"
            )
        raise JobFailedError(
            f"an answer has got no token for {self._wait_s:g} s from any of "
            f"{len(self._seats)} engines (the last failure: {self._last_failure}); start "
            "engines, or give a longer wait_s"
        )


def _there(reports: queue.Queue[Report]) -> Iterator[Report]:
    """Yield the reports that are there already, up to ``_MOST_TOGETHER``."""
    with contextlib.suppress(queue.Empty):
        for _ in range(_MOST_TOGETHER):
            yield reports.get_nowait()


def _end(attempt: Attempt, running: list[Attempt]) -> None:
    attempt.stopped.set()
    attempt.seat.running -= 1
    running.remove(attempt)
