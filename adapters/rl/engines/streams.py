"""A stream of one engine for one answer, on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.adapters.rl.engines.protocol import SampledToken, TokenPlace, runs_of
from holdfast.adapters.rl.engines.seats import EngineSeat, Weights
from holdfast.adapters.rl.rollout.episode import Episode
from holdfast.adapters.rl.samples.sample import Sample
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.elastic.errors import ConfigError

POLL_S: Final = 0.05
"""The longest wait of both sides before they look around."""


@dataclass(slots=True, eq=False)
class PoolWork:
    """An answer with ``tokens`` that is not finished.

    ``since`` is the time of its last token or its first try, ``floor`` the oldest version that its
    next token may be of.
    """

    answer: Sample
    since: float | None = None
    floor: int = field(init=False)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.answer, Episode):
            raise ConfigError(
                "engines of a pool finish answers of one turn, and the plan has "
                "TurnLimits(turns=True): sample turns in your own loop, or leave turns out"
            )
        self.floor, self.tokens = self.answer.version, len(self.answer.tokens)


@dataclass(slots=True, eq=False)
class Attempt:
    """A stream of an engine for an answer, after ``text``; ``heard_s`` is its last token's time.

    ``stopped``: nobody wants more of it. ``leaving``: it ends after its next tokens, at the latest
    at ``leave_by_s``.
    """

    work: PoolWork
    text: Tokens
    seat: EngineSeat
    begun_s: float
    heard_s: float | None = None
    leave_by_s: float | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    leaving: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class Report:
    """Tokens of a stream, or its end, with the error if it was none of the answer."""

    attempt: Attempt
    tokens: Sequence[SampledToken] = ()
    error: Exception | None = None


def stream(
    attempt: Attempt, reports: queue.Queue[Report], newest: Callable[[], Weights | None]
) -> None:
    """Hand on the tokens of a stream, until it ends or nobody wants them.

    The engine gets the ``newest`` weights before.
    """
    error: Exception | None = None
    try:
        attempt.seat.renew(newest)
        if attempt.stopped.is_set():
            return
        runs = runs_of(attempt.seat.engine, attempt.text, _place_of(attempt.work.answer))
        for tokens in runs:
            if not _put(Report(attempt, tokens=tokens), reports):
                runs.close()
                return
            if attempt.leaving.is_set():
                runs.close()
                break
    except Exception as found:  # noqa: BLE001 - the caller's thread raises it
        error = found
    _put(Report(attempt, error=error), reports)


def _place_of(answer: Sample) -> TokenPlace:
    return TokenPlace(
        seed=answer.seed, ordinal=answer.ordinal, sample=answer.sample, prompt=len(answer.prompt)
    )


def _put(report: Report, reports: queue.Queue[Report]) -> bool:
    """Put a report; return False if its stream is no longer wanted."""
    while not report.attempt.stopped.is_set():
        try:
            reports.put(report, timeout=POLL_S)
        except queue.Full:
            continue
        return True
    return False
