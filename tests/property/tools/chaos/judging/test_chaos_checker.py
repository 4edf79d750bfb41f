"""The checker against jobs that restart at random: no false alarm, and no missed error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.tools.chaos.judging.checker import CHECKS, HistoryVerdict, Promises, check
from holdfast.tools.chaos.judging.history import of_events
from holdfast.tools.chaos.judging.record import History, HookLine

STEPS, RANKS, PER_RANK = 24, 3, 2
Event = dict[str, Any]


def samples_of(step: int, rank: int, ranks: int) -> list[int]:
    whole = range(step * RANKS * PER_RANK, (step + 1) * RANKS * PER_RANK)
    return list(whole)[rank::ranks]


def job(seed: int, *, faults: int, resize: bool = True) -> list[Event]:
    """A job whose restarts go on from an earlier step, perhaps with other ranks."""
    draw = random.Random(seed)
    events: list[Event] = []
    at, attempt, ranks, now_s = 0, 0, RANKS, 0.0
    struck = 0
    while at < STEPS:
        alive = set(range(ranks))
        died = None
        while at < STEPS and died is None:
            if struck < faults and draw.random() < 0.3:
                died, struck = draw.randrange(ranks), struck + 1
            order = sorted(alive, key=lambda _: draw.random())
            done = 0
            for rank in order:
                now_s += draw.random()
                fields = {"t": now_s, "step": at, "rank": rank, "attempt": attempt}
                ids = samples_of(at, rank, ranks)
                events.append({**fields, "kind": "samples", "ids": ids, "epoch": 0})
                if rank == died:
                    break
                done += 1
                events.append({**fields, "kind": "step"})
                if rank == 0:
                    events.append({**fields, "kind": "state", "digest": f"state {at}"})
            if died is None or done:
                at += 1
        if at < STEPS:
            at -= min(at, draw.randrange(4) + (1 if died is not None else 0))
            attempt += 1
            ranks = draw.choice((2, 3)) if resize else ranks
            now_s += 1
    return events


def history_of(lines: list[Event]) -> History:
    return of_events(msgspec.convert(line, HookLine) for line in lines)


def judged(
    events: list[Event], *, against: list[Event] | None = None, **more: Any
) -> HistoryVerdict:
    reference = None if against is None else history_of(against)
    return check(history_of(events), reference=reference, promises=Promises(**more))


CALM = job(0, faults=0)


@given(st.integers(0, 10_000), st.integers(0, 5))
def test_a_job_that_restarts_rightly_breaks_nothing(seed: int, faults: int) -> None:
    verdict = judged(job(seed, faults=faults), against=CALM, dense=True)
    assert verdict.held, verdict.violations
    assert verdict.steps == STEPS
    assert verdict.executed == verdict.steps + verdict.undone
    assert set(verdict.checked) == set(CHECKS) - {"bounded loss"}


def survivors(events: list[Event], kind: str) -> list[Event]:
    history = history_of(events)
    return [e for e in events if e["kind"] == kind and history.surviving[e["step"]] == e["attempt"]]


def _repeated_sample(events: list[Event], draw: random.Random) -> None:
    one, other = draw.sample(survivors(events, "samples"), 2)
    one["ids"] = [other["ids"][0], *one["ids"][1:]]


def _skipped_sample(events: list[Event], draw: random.Random) -> None:
    last = max(event["step"] for event in events)
    early = [e for e in survivors(events, "samples") if e["step"] < last]
    draw.choice(early)["ids"].pop()


def _skipped_step(events: list[Event], draw: random.Random) -> None:
    step = draw.randrange(1, STEPS - 1)
    events[:] = [event for event in events if event["step"] != step]


def _late_rank(events: list[Event], draw: random.Random) -> None:
    later = max(event["t"] for event in events) + 1
    events.append({"t": later, "kind": "step", "step": STEPS, "rank": 1, "attempt": -1})


def _other_state(events: list[Event], draw: random.Random) -> None:
    draw.choice(survivors(events, "state"))["digest"] = "something else"


def _silent_rank(events: list[Event], draw: random.Random) -> None:
    ranks_of = history_of(events).ranks
    candidates = survivors(events, "samples")
    candidates = [e for e in candidates if e["rank"] in ranks_of[e["attempt"], e["step"]]]
    candidates = [e for e in candidates if len(ranks_of[e["attempt"], e["step"]]) > 1]
    events.remove(draw.choice(candidates))


def _end_too_soon(events: list[Event], draw: random.Random) -> None:
    events[:] = [event for event in events if event["step"] < STEPS - 2]


PLANTED: dict[str, Callable[[list[Event], random.Random], None]] = {
    "samples once": _repeated_sample,
    "no sample skipped": _skipped_sample,
    "no step skipped": _skipped_step,
    "one attempt at a time": _late_rank,
    "state of the reference": _other_state,
    "samples of all ranks": _silent_rank,
    "all steps": _end_too_soon,
}


@pytest.mark.parametrize("name", PLANTED)
@given(seed=st.integers(0, 10_000), faults=st.integers(0, 4))
def test_what_is_wrong_is_found(name: str, seed: int, faults: int) -> None:
    events = job(seed, faults=faults)
    PLANTED[name](events, random.Random(seed))
    verdict = judged(events, against=CALM, dense=True)
    assert name in {each.check for each in verdict.violations}


def test_a_restart_that_undoes_more_than_it_may_is_told() -> None:
    for seed in range(50):
        events = job(seed, faults=2)
        most = judged(events).undone_most
        if most > 1:
            assert judged(events, undone_most=most).held
            found, *_ = judged(events, undone_most=most - 1).violations
            assert found.check == "bounded loss"
            assert f"{most} steps of attempt" in found.message
            return
    raise AssertionError("no restart undid anything")


def test_other_samples_than_the_references_are_told_with_the_step() -> None:
    events = job(3, faults=0)
    for event in events:
        if event["kind"] == "samples" and event["step"] == 7:
            event["ids"] = [each + 1_000_000 for each in event["ids"]]
    found = {each.check: each.message for each in judged(events, against=CALM).violations}
    assert (
        "1 steps trained on other samples than the reference: 7"
        in found["samples of the reference"]
    )


def test_a_history_is_a_value() -> None:
    history = history_of(CALM)
    again = msgspec.json.decode(msgspec.json.encode(history), type=History)
    assert again == history
