"""Folders of invented runs: of a Holdfast job on three nodes, and of a plain one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from synthetic_run import BEGIN, hurt_job

from holdfast.elastic.events import Event, FaultInjected, encode
from holdfast.tools.chaos.judging.checker import check
from holdfast.tools.chaos.judging.history import of_events
from holdfast.tools.chaos.judging.record import Consumed, HookLine, StepCommit, Told, time_of
from holdfast.tools.chaos.judging.result import HISTORY, Result, Struck, save


def struck(number: int, kind: str, victim: str, at_s: float, *, missed: bool = False) -> Struck:
    """Return a strike so many seconds after the job began."""
    return Struck(number=number, kind=kind, victim=victim, t=BEGIN + at_s, missed=missed)


SYNTHETIC = (
    struck(0, "stop", "agent of c", 5.1),
    struck(1, "kill", "trainer/1", 8.3),
    struck(2, "kill", "rollout/0", 13.0),
    struck(3, "kill", "trainer/9", 14.0, missed=True),
    struck(4, "lose", "node a", 17.0),
)
"""The strikes on `hurt_job`; the first did no harm, the one before the last hit nothing."""


def holdfast_events() -> list[Event]:
    """Return the events of `hurt_job` without the faults, which the result has."""
    told = (event for event in hurt_job() if not isinstance(event, FaultInjected))
    return sorted(told, key=time_of)


def commit(at_s: float, step: int, rank: int, attempt: int) -> StepCommit:
    """Return a line of a hook."""
    return StepCommit(t=BEGIN + at_s, step=step, rank=rank, attempt=attempt)


def plain_events(*, samples: bool = True) -> list[HookLine]:
    """Return a plain job of two ranks: steps 0 to 6, then hurt, again from step 5 to 9.

    A step takes a second, of which it trains 0.8; the second attempt begins at 12 s.
    """
    events: list[HookLine] = []
    for attempt, first, last, begin_s in ((0, 0, 6, 0.0), (1, 5, 9, 12.0)):
        for step in range(first, last + 1):
            at_s = begin_s + step - first
            for rank in range(2):
                if samples:
                    ids = (4 * step + 2 * rank, 4 * step + 2 * rank + 1)
                    at = {"t": BEGIN + at_s + 0.2, "step": step, "rank": rank}
                    events.append(Consumed(**at, attempt=attempt, ids=ids, epoch=0))
                events.append(commit(at_s + 1.0, step, rank, attempt))
    return sorted(events, key=time_of)


def write_history(folder: Path, told: Iterable[Told]) -> Path:
    """Write what a job told as a history: the lines of hooks, and events."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[bytes]] = {"history-here-1-a.jsonl": [], "events-here.jsonl": []}
    for each in told:
        is_event = isinstance(each, Event)
        line = encode(each) if is_event else msgspec.json.encode(each)
        files["events-here.jsonl" if is_event else "history-here-1-a.jsonl"].append(line + b"\n")
    for name, lines in files.items():
        (folder / name).write_bytes(b"".join(lines))
    return folder


def write_run(
    folder: Path,
    events: Sequence[Told],
    *,
    strikes: Sequence[Struck] = (),
    name: str = "kills",
    seed: int = 7,
    problems: Sequence[str] = (),
) -> Path:
    """Write the folder of a run."""
    write_history(folder / HISTORY, events)
    verdict = check(of_events(events))
    result = Result(
        name=name,
        world="real",
        seed=seed,
        only=None,
        held=verdict.held and not problems,
        seconds=25.0,
        verdict=verdict,
        struck=tuple(strikes),
        problems=tuple(problems),
        replay=f"holdfast chaos run {name}.toml --seed {seed}",
    )
    save(folder, result)
    return folder
