"""Bugs of the few agents that decide for a large job, found in small jobs that count as large.

The trial is that of `mutants.control`, with one or two deciders and every other agent following.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from doubles.drawing import draw_config

from holdfast.elastic.coordinator.base import KeyEvent
from holdfast.elastic.decisions import agree, deciding
from holdfast.elastic.membership.records import NodeRecord
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.testing.simulation.simulator import Simulation
from holdfast.elastic.testing.simulation.training import InvariantError
from mutants.bug import Bug


def trial(seed: int) -> str:
    """Run the job of a seed as a large one under its faults; return the broken invariant, or ""."""
    config = replace(draw_config(seed), most_watchers=0, deciders=1 + seed % 2)
    try:
        report = Simulation(config, seed=seed).run()
    except InvariantError as error:
        return str(error).rpartition("\n")[2].strip()
    return "" if report.outcome.ok else f"the job failed: {report.outcome.message}"


def _follower_decides(_real: Any) -> Any:
    def follow(view: JobView, *, own: NodeRecord, stand: bool) -> tuple[agree.Decision, str]:
        seen = agree.observe(view, agree.FirstSeen(), now_s=0.0)
        alone = replace(view, deciders={})
        return agree.decide(alone, seen, node=own.node, now_s=3600.0, stand=stand)

    return follow


def _trusts_the_bulletin(real: Callable[..., list[str]]) -> Any:
    def unfenced(view: JobView, *, group: bool) -> list[str]:
        over = view.bulletin is not None and view.bulletin.over >= view.number
        return [] if over else real(view, group=group)

    return unfenced


def _place_stays_taken(real: Callable[..., Any]) -> Any:
    def claim(view: JobView, free: deciding.FreePlaces, **more: Any) -> Any:
        return real(view, free, **more) if view.generation is None else (None, None)

    return claim


def _obeys_any_bulletin(real: Callable[..., Any]) -> Any:
    def follow(view: JobView, *, own: NodeRecord, stand: bool) -> tuple[agree.Decision, str]:
        if view.bulletin is not None and view.bulletin.over and own.fenced < view.number:
            return agree.FenceWorkers(generation=view.number), view.bulletin.reason
        found: tuple[agree.Decision, str] = real(view, own=own, stand=stand)
        return found

    return follow


def _keeps_it_to_itself(real: Callable[..., Any]) -> Any:
    def tell(view: JobView, *, fencing: int, halting: int, reason: str) -> Any:
        return real(view, fencing=0, halting=halting, reason=reason)

    return tell


def _takes_the_newest_alone(_real: Any) -> Any:
    def telling(events: Iterable[KeyEvent]) -> Iterable[KeyEvent]:
        ordered = sorted(events, key=lambda event: event.revision)
        return {event.key: event for event in ordered}.values()

    return telling


def _removes_its_own(real: Callable[..., list[str]]) -> Any:
    def superseded(key: str, keys: Iterable[str], *, base: int, own: Iterable[str]) -> list[str]:
        return real(key, keys, base=base, own=())

    return superseded


def _asks_for_no_part(_real: Any) -> Any:
    return lambda values, *, follows: ()


def _bug(name: str, about: str, where: str, broken: Callable[[Any], Any], seed: int) -> Bug:
    return Bug(name=name, about=about, where=where, broken=broken, trial="deciders", seed=seed)


BUGS: Final = (
    _bug(
        "follower-decides",
        "an agent that follows proposes, from what it knows of the others",
        "holdfast.elastic.decisions.deciding:follow",
        _follower_decides,
        4,
    ),
    _bug(
        "word-for-fence",
        "a second decider takes the bulletin of the first for the fences of the nodes",
        "holdfast.elastic.decisions.agree:_unfenced",
        _trusts_the_bulletin,
        10,
    ),
    _bug(
        "dead-decider",
        "the place of a decider that is lost stays taken",
        "holdfast.elastic.decisions.deciding:claim",
        _place_stays_taken,
        8,
    ),
    _bug(
        "stale-bulletin",
        "a bulletin about an earlier generation ends the present one",
        "holdfast.elastic.decisions.deciding:follow",
        _obeys_any_bulletin,
        8,
    ),
    _bug(
        "decider-silent",
        "a decider does not tell that a generation is over",
        "holdfast.elastic.decisions.deciding:tell",
        _keeps_it_to_itself,
        4,
    ),
    _bug(
        "change-skipped",
        "of several changes of a divided record an agent reads the newest alone",
        "holdfast.elastic.membership.view:_telling",
        _takes_the_newest_alone,
        21,
    ),
    _bug(
        "parts-removed",
        "a proposer removes the parts of its own generation as well",
        "holdfast.elastic.membership.divided:superseded",
        _removes_its_own,
        0,
    ),
    _bug(
        "parts-unread",
        "an agent without the record before does not read the parts of a divided one",
        "holdfast.elastic.membership.divided:lacking",
        _asks_for_no_part,
        0,
    ),
)
