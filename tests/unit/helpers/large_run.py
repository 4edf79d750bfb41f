"""The events of a large run that never was: many nodes, many steps, losses now and then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.elastic.events import (
    CheckpointDone,
    CheckpointStarted,
    Detected,
    Event,
    GenerationProposed,
    JobStarted,
    MetricsLogged,
    RankReformed,
    SidecarStarted,
    StateRestored,
    StepDone,
    StepProtected,
    TrainingResumed,
    WorkerStarted,
)
from holdfast.elastic.events.wire import encode

BEGIN_S: Final = 1_700_000_000.0


def start(nodes: int, *, begin_s: float = BEGIN_S) -> Iterator[Event]:
    """Yield the start of a job with a trainer on each node, up to its first generation."""
    names = tuple(f"node{number}" for number in range(nodes))
    seats = tuple(f"trainer/{number}" for number in range(nodes))
    yield JobStarted(
        run="large", nodes=names, wanted={"trainer": nodes}, node="launcher", time_s=begin_s
    )
    for number, (name, seat) in enumerate(zip(names, seats, strict=True)):
        at = {"node": name, "time_s": begin_s + 1 + number / nodes}
        yield SidecarStarted(pid=1000 + number, source="agent", **at)
        yield WorkerStarted(pid=5000 + number, attempt=1, seat=seat, source="agent", **at)
    yield from generation(1, seats, at_s=begin_s + 10, restore_step=None)


def generation(
    number: int, seats: tuple[str, ...], *, at_s: float, restore_step: int | None
) -> Iterator[Event]:
    """Yield a generation from its proposal until all ranks have their state."""
    yield GenerationProposed(
        generation=number,
        ranks=seats,
        restore_step=restore_step,
        restore_how="none" if restore_step is None else "memory",
        reason=f"generation {number}: {len(seats)} trainers",
        node="node0",
        source="agent",
        time_s=at_s,
    )
    for rank, seat in enumerate(seats):
        common = {
            "node": f"node{seat.rpartition('/')[2]}",
            "seat": seat,
            "source": "worker",
            "generation": number,
            "rank": rank,
        }
        yield RankReformed(world=len(seats), time_s=at_s + 0.05, **common)
        yield StateRestored(
            step=restore_step or 0,
            tier="none" if restore_step is None else "peer",
            bytes=1 << 20,
            time_s=at_s + 0.1,
            **common,
        )


def step(
    number: int, generation: int, *, at_s: float, rank: int = 0, seconds: float = 0.5
) -> StepDone:
    """Return a step that ends at ``at_s``."""
    return StepDone(
        step=number,
        generation=generation,
        rank=rank,
        seat=f"trainer/{rank}",
        node=f"node{rank}",
        source="worker",
        start_s=at_s - seconds,
        seconds=seconds,
        stall_s=0.001,
        protected=number - 1,
        unprotected_s=seconds,
        copied_bytes=number,
        time_s=at_s,
    )


def training(
    nodes: int, *, steps: int, ranks: int = 1, lose_every: int = 0, pace_s: float = 0.5
) -> Iterator[Event]:
    """Yield a whole run of which the first ``ranks`` ranks tell their steps.

    Every ``lose_every`` steps a process is lost and the step before it is executed again.
    """
    yield from start(nodes)
    seats = tuple(f"trainer/{number}" for number in range(nodes))
    at_s, now = BEGIN_S + 10.1, 1
    for number in range(1, steps + 1):
        at_s += pace_s
        for rank in range(ranks):
            yield step(number, now, at_s=at_s, rank=rank, seconds=pace_s)
        yield MetricsLogged(
            step=number, values={"loss": 10 / number}, node="node0", source="worker", time_s=at_s
        )
        if number % 2 == 0:
            yield StepProtected(
                generation=now, step=number, seconds=0.04, node="node0", time_s=at_s
            )
        if number % 100 == 0:
            common = {"step": number, "bytes": 1 << 30, "node": "node0"}
            yield CheckpointStarted(time_s=at_s, **common)
            yield CheckpointDone(seconds=2.0, bytes_per_s=1 << 29, time_s=at_s + 0.2, **common)
        if lose_every and number % lose_every == 0:
            now += 1
            victim = f"trainer/{number % nodes}"
            yield Detected(
                what="exit", victim=victim, why="killed by SIGKILL", node="node0", time_s=at_s + 0.1
            )
            yield from generation(now, seats, at_s=at_s + 0.3, restore_step=number - 1)
            at_s += 0.4 + pace_s
            yield step(number, now, at_s=at_s, seconds=pace_s)
            yield TrainingResumed(
                generation=now, step=number, node="node0", time_s=at_s, source="worker"
            )


def write(run_dir: Path, events: Iterator[Event]) -> int:
    """Write events to the files of their nodes; return how many there were."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[bytes]] = {}
    count = 0
    for count, event in enumerate(events, start=1):  # noqa: B007
        lines.setdefault(event.node, []).append(encode(event) + b"\n")
    for node, found in lines.items():
        (run_dir / f"events-{node}.jsonl").write_bytes(b"".join(found))
    return count
