"""Section rl: the gain from asynchrony with long-tailed samples, and the cost of a loss.

The included trainer runs as real processes: one or two trainer ranks and two workers that sample.
Its environment is a simulated tool: the number of turns of an episode and the delay of each reply
have long tails, and are the same in every mode. The modes take turns; then workers of both roles
are killed in a job that keeps training.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from holdfast.adapters.rl.config import ROLE, RLConfig, WarmStart, save_config
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.ledger.plan import Mode
from holdfast.adapters.rl.policy.model import ModelConfig
from holdfast.elastic.events import (
    Event,
    MetricsLogged,
    RankReformed,
    StepDone,
    TokensSampled,
    of_kind,
)
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.membership.records import TRAINER
from holdfast.tools.bench.faults.elastic_job import ElasticJob, running
from holdfast.tools.bench.faults.pauses import sampled as median_of
from holdfast.tools.bench.faults.recoveries import after_fault
from holdfast.tools.bench.rollouts import StepPace, handed_on, logged, pace, sampled
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo
from holdfast.tools.report.timeline import KILL_ROLLOUT, KILL_TRAINER

WORKLOAD: Final = RLConfig(
    environment=EnvironmentConfig(
        factory="slow_tool",
        settings={
            "latency_s": 0.15,
            "latency_tail": 1.0,
            "longest_s": 3.0,
            "turns": 2.0,
            "turns_tail": 0.7,
            "most_turns": 8,
            "most_letters": 12,
        },
        threads=16,
    ),
    model=ModelConfig(width=64, layers=2, context=512),
    warm=WarmStart(steps=0),
    steps=24,
    groups=8,
    group=4,
    microbatches=4,
    eta=2,
    max_new_tokens=48,
    lr=1e-6,  # lengths must not change
    slots=24,
    log_every_ticks=16,  # about every 20 ms
    held_out=2,
    evaluate_every=1_000_000,
)
_QUICK_STEPS: Final = 10
_MODES: Final[dict[str, dict[str, Any]]] = {
    "sync": {"mode": Mode.SYNC},
    "fixed_lag(2)": {"mode": Mode.FIXED_LAG},
    "bounded(2)": {"mode": Mode.BOUNDED},
    "bounded(2), no logs": {"mode": Mode.BOUNDED, "log_rollouts": False},
}
_BASE: Final = "sync"
_OURS: Final = "bounded(2)"
_BARE: Final = "bounded(2), no logs"
_KILLS: Final = 10
_QUICK_KILLS: Final = 1
_SETTLE_STEPS: Final = 3
_BEFORE_S: Final = 3.0
"""Seconds before a loss over which the sampling rate is measured for comparison."""

RATE: Final = "tokens/s"
SAMPLES: Final = "samples/s"
WAITED: Final = "trainer waits"
LOST: Final = "a rollout worker killed"
TRAINER_LOST: Final = "a trainer rank killed"


def rl(setup: BenchSetup) -> list[Figure]:
    """Run every mode in turn, then a job under kills; the size of the state does not matter."""
    kills = _QUICK_KILLS if setup.quick else max(_KILLS, setup.repeat)
    with Tempo(setup, total=setup.repeat * len(_MODES) + 2 * kills) as tempo:
        paces, logs = _undisturbed(setup, tempo)
        hurt = _hurt(setup, kills, tempo)
    return [*_throughput(paces), *_protection(paces, logs), *hurt]


# -- undisturbed -----------------------------------------------------------------------------------


def _undisturbed(
    setup: BenchSetup, tempo: Tempo
) -> tuple[dict[str, list[StepPace]], list[tuple[float, float]]]:
    """Return the paces of every mode, and (share of time, bytes per token) of every log."""
    paces: dict[str, list[StepPace]] = {name: [] for name in _MODES}
    logs: list[tuple[float, float]] = []
    steps = _QUICK_STEPS if setup.quick else WORKLOAD.steps
    for number in range(setup.repeat):
        for name, changes in _MODES.items():
            tempo.say(f"{name}, {number + 1} of {setup.repeat}")
            config = msgspec.structs.replace(WORKLOAD, steps=steps, **changes)
            with _job(setup, f"{number}-{len(logs)}-{name}", config, trainers=1) as job:
                job.log.until(partial(_completed, steps=steps), "its last step")
                paces[name].append(pace(job.log.events))
                if name == _OURS:
                    found = logged(job.log.events)
                    logs.append((found.share, found.nbytes / found.tokens))
            tempo.beat()
    return paces, logs


def _completed(events: Sequence[Event], *, steps: int) -> bool | None:
    done = (event for event in of_kind(events, MetricsLogged) if event.step >= steps)
    return True if next(done, None) else None


def _throughput(paces: dict[str, list[StepPace]]) -> list[Figure]:
    found: list[Figure] = []
    base: Figure | None = None
    for name, each in paces.items():
        rates = [one.tokens / one.seconds for one in each]
        rows = WORKLOAD.rows
        rate = median_of("rl", f"{name}: {RATE}", rates, unit="tokens/s", versus=base)
        base = base or rate
        found += [
            rate,
            median_of(
                "rl",
                f"{name}: {SAMPLES}",
                [one.steps * rows / one.seconds for one in each],
                unit="samples/s",
            ),
            median_of("rl", f"{name}: {WAITED}", [one.waited for one in each], unit=""),
        ]
    return found


def _protection(
    paces: dict[str, list[StepPace]], logs: Sequence[tuple[float, float]]
) -> list[Figure]:
    """Return the cost of rollout logs: in total, in the workers' own time, and in memory."""
    slower = [
        1 - (ours.tokens / ours.seconds) / (bare.tokens / bare.seconds)
        for ours, bare in zip(paces[_OURS], paces[_BARE], strict=True)
    ]
    return [
        median_of("rl", "protecting rollouts: fewer tokens/s than without", slower, unit=""),
        median_of("rl", "protecting rollouts: of a worker's time", [s for s, _ in logs], unit=""),
        median_of("rl", "protecting rollouts: bytes per token", [b for _, b in logs], unit="B"),
    ]


# -- under kills -----------------------------------------------------------------------------------


def _hurt(setup: BenchSetup, kills: int, tempo: Tempo) -> list[Figure]:
    """Kill rollout workers and trainer ranks in one job, which keeps running."""
    config = msgspec.structs.replace(WORKLOAD, steps=1_000_000, mode=Mode.BOUNDED)
    handed: list[float] = []
    again: list[float] = []
    share: list[float] = []
    going_on: list[float] = []
    with _job(setup, "hurt", config, trainers=2) as job:
        _settle(job, since_s=0.0)
        for number in range(kills):
            tempo.say(f"{LOST}, {number + 1} of {kills}")
            seat = f"{ROLE}/{number % 2}"
            killed_s = job.kill(seat, what=KILL_ROLLOUT)
            event = job.log.until(
                partial(handed_on, seat=seat, since_s=killed_s), f"what {seat} had, taken back"
            )
            handed.append(event.time_s - killed_s)
            again.append(float(event.resampled))
            handled = event.tokens + event.resampled
            share.append(event.resampled / handled if handled else 0.0)
            _settle(job, since_s=time.time(), seat=seat)
            tempo.beat()
        for number in range(kills):
            tempo.say(f"{TRAINER_LOST}, {number + 1} of {kills}")
            seat = f"{TRAINER}/{number % 2}"
            killed_s = job.kill(seat, what=KILL_TRAINER)
            found = job.log.until(partial(after_fault, killed_s=killed_s), f"a step without {seat}")
            going_on.append(_kept_up(job.log.events, killed_s=killed_s, begun_s=found.step_s))
            job.log.until(partial(_ranks, since_s=killed_s, world=2), f"another {seat}")
            _settle(job, since_s=time.time())
            tempo.beat()
    return [
        median_of("rl", f"{LOST}: its work taken back", handed),
        median_of("rl", f"{LOST}: tokens to be sampled again", again, unit="tokens"),
        median_of("rl", f"{LOST}: of what it held", share, unit=""),
        median_of("rl", f"{TRAINER_LOST}: tokens/s meanwhile, beside before", going_on, unit=""),
    ]


def _kept_up(events: Sequence[Event], *, killed_s: float, begun_s: float) -> float:
    """Return the sampling rate while training stood still, as a share of the rate before."""
    before = sampled(events, since_s=killed_s - _BEFORE_S, until_s=killed_s) / _BEFORE_S
    during = sampled(events, since_s=killed_s, until_s=begun_s) / (begun_s - killed_s)
    return during / before if before else 0.0


def _settle(job: ElasticJob, *, since_s: float, seat: str | None = None) -> None:
    """Wait for some steps, and for ``seat`` to sample again."""

    def look(events: Sequence[Event]) -> bool | None:
        later = [event for event in events if event.time_s > since_s]
        steps = {event.step for event in of_kind(later, StepDone)}
        seats = {event.seat for event in of_kind(later, TokensSampled)}
        samples = seat is None or seat in seats
        return True if len(steps) >= _SETTLE_STEPS and samples else None

    job.log.until(look, "some steps")


def _ranks(events: Sequence[Event], *, since_s: float, world: int) -> bool | None:
    formed = (event for event in of_kind(events, RankReformed) if event.time_s > since_s)
    return True if any(event.world == world for event in formed) else None


def _job(
    setup: BenchSetup, name: str, config: RLConfig, *, trainers: int
) -> AbstractContextManager[ElasticJob]:
    """Start a job of ``trainers`` trainer ranks and two rollout workers on two nodes."""
    run_dir = setup.directory / name.replace(" ", "-").replace("(", "-").replace(")", "")
    run_dir.mkdir()
    file = run_dir / "config.json"
    save_config(config, file)
    slots = [{ROLE: 1, **({TRAINER: 1} if number < trainers else {})} for number in range(2)]
    launch = LaunchConfig(
        command=(sys.executable, "-m", "holdfast.rl", "--config", str(file)),
        nodes=tuple(
            NodeSpec(name=f"n{number}", domain=f"n{number}", slots=each)
            for number, each in enumerate(slots)
        ),
        wanted={TRAINER: trainers, ROLE: 2},
        run_dir=run_dir,
        capture_output=True,
        max_attempts=1000,
    )
    return running(launch, run_dir)


# -- output ----------------------------------------------------------------------------------------


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print the modes side by side, then the costs of protection and of losses."""
    modes = Table(box=None, header_style="bold", pad_edge=False)
    modes.add_column("", no_wrap=True)
    for title in (RATE, "min–max", f"× {_BASE}", SAMPLES, WAITED):
        modes.add_column(title, justify="right", no_wrap=True)
    costs = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", "median", "min–max"):
        costs.add_column(title, justify="right" if title else "left", no_wrap=True)
    named = {figure.name: figure for figure in figures}
    for name in _MODES:
        rate, waited = named[f"{name}: {RATE}"], named[f"{name}: {WAITED}"]
        modes.add_row(
            name,
            f"{rate.value:,.0f}",
            f"{rate.low:,.0f}–{rate.high:,.0f}",
            "" if rate.ratio is None else f"{rate.ratio:.2f}",
            f"{named[f'{name}: {SAMPLES}'].value:,.1f}",
            f"{waited.value:.0%}",
        )
    for figure in figures:
        if figure.name.partition(": ")[0] not in _MODES:
            shown = [_value(each, figure.unit) for each in (figure.value, figure.low, figure.high)]
            costs.add_row(figure.name, shown[0], f"{shown[1]}–{shown[2]}")
    console.print(modes)
    console.print(costs)


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.3f} s"
    if unit:
        return f"{value:,.1f} {unit}"
    return f"{value:.1%}"
