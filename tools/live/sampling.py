"""Reinforcement learning in a run: workers, versions, waits, samples. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from holdfast.elastic.events import (
    BackPressure,
    EnvironmentWaits,
    Event,
    LedgerCounted,
    RolloutRecovered,
    RolloutsAwaited,
    RuleViolated,
    SampleRechecked,
    SamplingChanged,
    StepTail,
    TokensSampled,
    VersionUnavailable,
    WeightsPulled,
    WeightsRefused,
)
from holdfast.tools.live.view import RolloutsView

_NEVER: Final = -math.inf
_RECENT_S: Final = 10.0
"""The time over which the rate of sampling is taken."""


@dataclass(slots=True)
class SamplerTotals:
    """A rollout worker as it told itself; totals begin anew with its process."""

    told_s: float = _NEVER
    tokens: int = 0
    before: tuple[float, int] | None = None
    sampling_s: float = _NEVER
    samples: int = 0
    version: int | None = None
    pulled_s: float = _NEVER
    waits_s: float = _NEVER
    wait_p95_s: float = 0.0
    waiting: int = 0

    def told(self, event: TokensSampled) -> None:
        """Take over the totals; some seconds ago lie those that the rate begins from."""
        if event.time_s < self.told_s:
            return
        far = self.before is None or event.time_s - self.before[0] > _RECENT_S
        if far or event.tokens < self.tokens:
            restarted = event.tokens < self.tokens or not math.isfinite(self.told_s)
            self.before = (event.time_s, event.tokens) if restarted else (self.told_s, self.tokens)
        self.told_s, self.tokens = event.time_s, event.tokens

    @property
    def tokens_per_s(self) -> float | None:
        """The rate of the last seconds; None before two reports."""
        if self.before is None or self.told_s <= self.before[0]:
            return None
        return (self.tokens - self.before[1]) / (self.told_s - self.before[0])


class Sampling:
    """Folds the events of rollout workers and of the samples that trainers wait for."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._samplers: dict[str, SamplerTotals] = {}
        self._tokens_before = 0
        self._newest: dict[str, tuple[float, Event]] = {}
        self._sums: dict[str, int] = {}
        self._difference = -math.inf

    def apply(self, event: Event) -> None:
        """Take over an event of any kind."""
        match event:
            case TokensSampled():
                sampler = self._sampler(event.seat)
                if event.tokens < sampler.tokens and event.time_s > sampler.told_s:
                    self._tokens_before += sampler.tokens
                sampler.told(event)
            case SamplingChanged(samples=samples):
                sampler = self._sampler(event.seat)
                if event.time_s >= sampler.sampling_s:
                    sampler.sampling_s, sampler.samples = event.time_s, samples
            case WeightsPulled(version=version):
                sampler = self._sampler(event.seat)
                if event.time_s >= sampler.pulled_s:
                    sampler.pulled_s, sampler.version = event.time_s, version
                self._add("pulled", 1)
                self._add("pulled_bytes", event.bytes)
            case EnvironmentWaits():
                sampler = self._sampler(event.seat)
                if event.time_s >= sampler.waits_s:
                    sampler.waits_s, sampler.wait_p95_s = event.time_s, event.p95_s
                    sampler.waiting = event.waiting
                self._add("environment_failed", event.failed)
            case _:
                self._counted(event)

    def _counted(self, event: Event) -> None:
        match event:
            case RolloutsAwaited(seconds=seconds):
                self.waited_s += seconds
                self._keep("awaited", event)
            case StepTail():
                self._keep("tail", event)
            case BackPressure():
                self._keep("pressure", event)
            case LedgerCounted():
                self._keep("ledger", event)
            case WeightsRefused():
                self._add("refused", 1)
            case VersionUnavailable():
                self._add("unavailable", 1)
            case RolloutRecovered(tokens=tokens, resampled=resampled):
                self._add("recovered", 1)
                self._add("salvaged_tokens", tokens)
                self._add("resampled_tokens", resampled)
            case SampleRechecked(difference=difference):
                self._add("rechecked", 1)
                self._difference = max(
                    self._difference, math.inf if difference is None else difference
                )
            case RuleViolated():
                self._add("violations", 1)

    def seats(self) -> dict[str, dict[str, int]]:
        """Return the ``tokens``, ``samples`` and ``version`` of each rollout worker."""
        return {
            seat: {
                "tokens": each.tokens,
                "samples": each.samples,
                **({} if each.version is None else {"version": each.version}),
            }
            for seat, each in self._samplers.items()
        }

    def view(
        self, *, step: int, alive: set[str], reward: float | None = None
    ) -> RolloutsView | None:
        """Return the view; None in a run without any of it. ``alive`` are the living workers."""
        if not (self._samplers or self._newest or self._sums):
            return None
        living = [each for seat, each in self._samplers.items() if seat in alive]
        versions = [each.version for each in living if each.version is not None]
        rates = [rate for each in living if (rate := each.tokens_per_s) is not None]
        awaited, tail = self._last("awaited"), self._last("tail")
        pressure = self._last("pressure")
        tailed = tail if isinstance(tail, StepTail) else None
        pressed = pressure if isinstance(pressure, BackPressure) else None
        counted = self._last("ledger")
        held = pressed.because if pressed and pressed.because != "none" else ""
        known = math.isfinite(self._difference)
        return RolloutsView(
            workers=len(living),
            sampling=sum(each.samples > 0 for each in living),
            samples_under_way=sum(each.samples for each in living),
            tokens=self._tokens_before + sum(each.tokens for each in self._samplers.values()),
            tokens_per_s=sum(rates) if rates else None,
            version_oldest=min(versions, default=None),
            version_newest=max(versions, default=None),
            staleness=max(step - min(versions), 0) if versions else None,
            waited_s=self.waited_s,
            waited_last_s=awaited.seconds if isinstance(awaited, RolloutsAwaited) else None,
            busy=tailed.busy if tailed else None,
            carried_tokens=tailed.carried_tokens if tailed else None,
            pressure=held,
            reward=reward,
            length_p50_tokens=tailed.length_p50_tokens if tailed else None,
            length_p95_tokens=tailed.length_p95_tokens if tailed else None,
            sample_waited_p95_s=tailed.waited_p95_s if tailed else None,
            difference_most=self._difference if known else None,
            environment_p95_s=max((each.wait_p95_s for each in living), default=None),
            environment_waiting=sum(each.waiting for each in living),
            **self._sums,
            **_held(counted if isinstance(counted, LedgerCounted) else None, pressed),
        )

    def _sampler(self, seat: str) -> SamplerTotals:
        if (found := self._samplers.get(seat)) is None:
            found = self._samplers[seat] = SamplerTotals()
        return found

    def _keep(self, name: str, event: Event) -> None:
        if event.time_s >= self._newest.get(name, (_NEVER,))[0]:
            self._newest[name] = event.time_s, event

    def _last(self, name: str) -> Event | None:
        return self._newest[name][1] if name in self._newest else None

    def _add(self, name: str, count: int) -> None:
        self._sums[name] = self._sums.get(name, 0) + count


def _held(counted: LedgerCounted | None, pressed: BackPressure | None) -> dict[str, int]:
    """Return the fields of the view that the ledger tells itself."""
    if counted is None:
        return {} if pressed is None else {"held_tokens": pressed.held_tokens}
    return {
        "pending": counted.pending,
        "running": counted.running,
        "ready": counted.ready,
        "trained": counted.trained,
        "dropped": counted.dropped,
        "skipped": counted.skipped,
        "awaited": counted.awaited,
        "held_tokens": counted.held_tokens,
        "staleness_most": counted.staleness_most,
        "duplicates": counted.duplicates,
    }
