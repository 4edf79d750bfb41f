"""A run's events as short lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.elastic.membership.records import TRAINER
from holdfast.tools.report.snapshot_costs import Costs

Event = Mapping[str, Any]

_WHAT = {
    "stopped": "was stopped",
    "hang": "hung",
    "node_lost": "was lost",
    "sidecar_exit": "ended",
    "lease_lost": "lost its lease",
    "join": "joined",
    "notice": "is to end",
    "stall": "got no further",
}
_OF_NODES = ("node_lost", "sidecar_exit", "lease_lost", "unreachable")
_ACTIONS = {
    "warn": "noted",
    "skip": "the step is left out",
    "rollback": "going back",
    "stop": "the job ends",
}


class Narrator:
    """Follows the events of one run and says what is worth a line."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._causes: list[str] = []
        self._caused_t: float | None = None
        self._proposals: dict[int, Event] = {}
        self._wanted = 0
        self._told = 0
        self._costs = Costs()

    def lines(self, event: Event) -> Iterator[str]:
        """Yield the lines that ``event`` gives rise to."""
        if self._quiet:
            return
        self._costs.add(event)
        match event["kind"]:
            case "job_started":
                self._wanted = event.get("wanted", {}).get(TRAINER, 0)
            case "detected":
                yield from self._detected(event)
            case "proposed":
                self._proposals[event["generation"]] = event
            case "resumed":
                yield from self._resumed(event)
            case kind if kind.startswith("checkpoint_"):
                yield from self._checkpoint(event)
            case "snapshots_left_out":
                yield (
                    f"{event['seat']}: SNAPSHOTS ARE LEFT OUT since step {event['newest']}, "
                    f"{event['count']} so far: {event['reason']}"
                )
            case kind if kind.startswith("data_worker"):
                yield f"{event['seat']}: {_data_worker(event)}"
            case (
                "stack"
                | "straggler"
                | "straggler_over"
                | "loss"
                | "handed_over"
                | "rehearsed"
                | "reachable"
            ):
                yield from self._remark(event)
            case "sidecar_failed":
                yield f"the sidecar of {event['node']} does not start: {event['error']}"
            case "job_ended" if (cost := self._costs.total()) is not None:
                yield str(cost)

    @staticmethod
    def _remark(event: Event) -> Iterator[str]:
        match event["kind"]:
            case "stack" if event["at"]:
                yield f"{event['seat']} stands at {event['at']}"
            case "straggler":
                yield event["why"]
            case "reachable":
                yield f"node {event['node']} reaches node {event['victim']} again"
            case "straggler_over":
                yield f"{event['victim']} keeps up with the others again"
            case "loss":
                yield f"step {event['step']}: {event['why']} ({_ACTIONS[event['action']]})"
            case "handed_over":
                yield f"{event['seat']} hands over at step {event['step']}"
            case "rehearsed" if event["error"] and not event["over"]:
                yield f"{event['seat']}: its rehearsal ended early: {event['error']}"

    @staticmethod
    def _checkpoint(event: Event) -> Iterator[str]:
        what = f"checkpoint of step {event['step']}"
        match event["kind"]:
            case "checkpoint_progress" if event["total_bytes"]:
                yield f"{what}: {event['bytes'] / event['total_bytes']:.0%} written"
            case "checkpoint_waiting":
                yield f"waiting for the {what}: {event['done']:.0%}"
            case "checkpoint_retried":
                yield f"{event['error']}; trying again ({event['attempt']})"
            case "checkpoint_carried":
                yield f"{what} is carried over to the new generation"
            case "checkpoint_skipped":
                yield f"{what} was skipped: {event['reason']}"
            case "checkpoint_failed" | "checkpoint_unsaved":
                yield event["error"]

    def _detected(self, event: Event) -> Iterator[str]:
        victim, what = event["victim"], event["what"]
        cause = _cause(victim, what, event.get("why", ""))
        if victim.startswith(f"{TRAINER}/") or what in _OF_NODES:
            self._causes.append(cause)
            if what != "join" and self._caused_t is None:
                self._caused_t = event["t"]
        if what != "join":
            yield cause

    def _resumed(self, event: Event) -> Iterator[str]:
        number = event["generation"]
        if number <= self._told or (proposal := self._proposals.get(number)) is None:
            return
        first, self._told = self._told == 0, number
        count = len(proposal["ranks"])
        of = f" of {self._wanted}" if count < self._wanted else ""
        noun = "trainer" if max(count, self._wanted if of else 0) == 1 else "trainers"
        after = f" after {', '.join(self._causes)}" if self._causes else ""
        took = f" in {event['t'] - self._caused_t:.2f} s" if self._caused_t else ""
        fresh = proposal.get("restore_step") is None and event["step"] <= 1
        started = "started" if first else "nothing was left to restore, started over from step 0"
        verb = started if fresh else f"resumed at step {event['step']}"
        self._causes, self._caused_t = [], None
        yield f"generation {number}: {count}{of} {noun}{after}; {verb}{took}"


def _data_worker(event: Event) -> str:
    loader = f"loader {event['loader']!r}"
    match event["kind"]:
        case "data_workers_forked":
            return f"{loader} forks its worker processes: {event['why']}"
        case "data_worker_stuck":
            what = "was stuck"
        case _:
            what = "died"
    again = f", {event['times']} times since the last batch" if event["times"] > 1 else ""
    return f"a worker process of {loader} {what} ({event['how']}){again}; they are started again"


def _cause(victim: str, what: str, why: str) -> str:
    if what == "unreachable":
        return why
    if what == "exit":
        return f"{victim} was {why}" if why.startswith("killed") else f"{victim} ended with {why}"
    text = f"{victim} {_WHAT.get(what, what)}"
    return f"{text} ({why})" if why else text
