"""Section watches: agents in few processes lose a node, on a real coordinator.

Counted is all that the watches deliver, and the changes that the store makes. Timed is the time
from the end of the lost node's lease until every other agent knows the next generation. Small jobs
run a second time with every agent watching every node.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from rich.console import Console

from holdfast.ckpt.errors import HoldfastError
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.embedded import EmbeddedServer
from holdfast.elastic.decisions.deciding import MOST_WATCHERS
from holdfast.elastic.membership.view import run_prefix
from holdfast.tools.bench.crowd.agents import RUN, CrowdCounts, CrowdPlan, serve
from holdfast.tools.bench.crowd.processes import answer, process
from holdfast.tools.bench.samples import BenchSetup, Figure, by_line
from holdfast.tools.chaos.faults.etcd.own_etcd import OwnEtcd

WORLDS: Final = (30, 100, 500, 1000)
QUICK_WORLDS: Final = (30, 60)
ALL_WATCH_UP_TO: Final = 100
KINDS: Final = ("embedded", "etcd")
"""Coordinators; etcd is left out where there is none."""

_PROCESSES: Final = 2
_FAULTS: Final = 3
_START_S: Final = 300.0
_CHANGE_S: Final = 120.0
QUIET_S: Final = 1.0
_POLL_S: Final = 0.05
_COLUMNS: Final = {
    "every agent knows": "all know",
    "every agent is in": "all in",
    "events": "events/change",
    "events per node": "per node",
    "delivered": "MiB/change",
    "changes": "writes/change",
    "new decider knows": "a decider lost",
}


def watches(setup: BenchSetup, *, worlds: Sequence[int] | None = None) -> list[Figure]:
    """Measure every number of nodes on every coordinator that there is."""
    found: list[Figure] = []
    for kind in [kind for kind in KINDS if kind != "etcd" or shutil.which("etcd")]:
        for nodes in worlds or (QUICK_WORLDS if setup.quick else WORLDS):
            setup.say(f"{nodes} agents on {kind}")
            found += _measured(kind, nodes, setup, most=MOST_WATCHERS)
            if MOST_WATCHERS < nodes <= ALL_WATCH_UP_TO:
                found += _measured(kind, nodes, setup, most=sys.maxsize)
    for _ in range(setup.repeat + 1):
        setup.lap()
    return found


def _measured(kind: str, nodes: int, setup: BenchSetup, *, most: int) -> Iterator[Figure]:
    name = f"{kind}, {nodes} nodes" + (", all watching" if most > nodes > MOST_WATCHERS else "")
    with ExitStack() as stack:
        key = RunKey.new()
        folder = setup.directory / f"watches-{kind}-{nodes}-{most == MOST_WATCHERS}"
        address = stack.enter_context(_SERVING[kind](key, folder))
        crowd = stack.enter_context(_Processes.started(address, key, nodes=nodes, most=most))
        changes = [crowd.lose(a_decider=False) for _ in range(max(_FAULTS, setup.repeat))]
        deciders = [crowd.lose(a_decider=True)] if nodes > most else []
    for what, unit, values in (
        ("every agent knows", "s", [each.knows_s for each in changes]),
        ("every agent is in", "s", [each.in_s for each in changes]),
        ("events", "events", [each.events for each in changes]),
        ("events per node", "events", [each.events / nodes for each in changes]),
        ("delivered", "MiB", [each.event_bytes / (1 << 20) for each in changes]),
        ("changes", "writes", [each.revisions for each in changes]),
        ("new decider knows", "s", [each.knows_s for each in deciders]),
    ):
        if values:
            yield Figure(
                section="watches",
                name=f"{name}: {what}",
                value=statistics.median(values),
                unit=unit,
                low=min(values),
                high=max(values),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """One change: seconds until all know the next generation and until all have said so."""

    knows_s: float
    in_s: float
    events: int
    event_bytes: int
    revisions: int


class _Processes:
    """The processes of the agents, and a connection to the coordinator that counts revisions."""

    def __init__(self, address: str, key: RunKey, pipes: dict[Connection, list[str]]) -> None:
        self._coordinator = connect(address, key)
        self._pipes = pipes
        self._generation = 1
        self._settle(1, limit_s=_START_S)

    @classmethod
    @contextmanager
    def started(cls, address: str, key: RunKey, *, nodes: int, most: int) -> Iterator[_Processes]:
        """Start the processes, and wait until all agents are in the first generation."""
        names = [f"n{number:05}" for number in range(nodes)]
        with ExitStack() as stack:
            pipes: dict[Connection, list[str]] = {}
            for number in range(_PROCESSES):
                mine = names[number::_PROCESSES]
                plan = CrowdPlan(
                    coordinator=address, key=key, names=tuple(mine), nodes=nodes, most=most
                )
                pipes[stack.enter_context(process(serve, plan))] = mine
            for pipe in pipes:
                answer(pipe, limit_s=_START_S)
            yield cls(address, key, pipes)

    def lose(self, *, a_decider: bool) -> _Change:
        """Lose one node; return what the change cost."""
        before = self._counts()
        revision = self._coordinator.range(run_prefix(RUN))[1]
        deciders = set(before[0].deciders)
        fitting = [
            (pipe, names)
            for pipe, names in self._pipes.items()
            if any((name in deciders) is a_decider for name in names)
        ]
        pipe, names = max(fitting, key=lambda each: len(each[1]))  # none loses its last agent
        name = next(name for name in reversed(names) if (name in deciders) is a_decider)
        names.remove(name)
        began_s = time.monotonic()
        pipe.send(name)
        answer(pipe, limit_s=_CHANGE_S)
        self._generation += 1
        knows_s, in_s = self._settle(self._generation, limit_s=_CHANGE_S)
        after = self._counts()
        return _Change(
            knows_s=knows_s - began_s,
            in_s=in_s - began_s,
            events=sum(each.events for each in after) - sum(each.events for each in before),
            event_bytes=sum(each.event_bytes for each in after)
            - sum(each.event_bytes for each in before),
            revisions=self._coordinator.range(run_prefix(RUN))[1] - revision,
        )

    def _counts(self) -> list[CrowdCounts]:
        for pipe in self._pipes:
            pipe.send(None)
        return [answer(pipe, limit_s=_CHANGE_S) for pipe in self._pipes]

    def _settle(self, generation: int, *, limit_s: float) -> tuple[float, float]:
        """Wait until all agents are in a generation and nothing more comes.

        Return the times at which the last one learned of it, and was seen in it.
        """
        agents = sum(map(len, self._pipes.values()))
        deadline_s = time.monotonic() + limit_s
        in_s, quiet_s, events = 0.0, time.monotonic(), -1
        while True:
            counts = self._counts()
            now_s = time.monotonic()
            known = [each.known.get(generation, (0, 0.0)) for each in counts]
            active = sum(each.active.get(generation, 0) for each in counts)
            if sum(each.events for each in counts) != events:
                events, quiet_s = sum(each.events for each in counts), now_s
            if sum(count for count, _ in known) == agents <= active:
                in_s = in_s or now_s
                if now_s > quiet_s + QUIET_S:
                    return max(at_s for _, at_s in known), in_s
            if now_s > deadline_s:
                raise HoldfastError(
                    f"{sum(count for count, _ in known)} of {agents} agents know generation "
                    f"{generation}, {active} are in it, after {limit_s:g} s"
                )
            time.sleep(_POLL_S)


@contextmanager
def _embedded(key: RunKey, folder: Path) -> Iterator[str]:
    with process(serve_embedded, key) as pipe:
        yield str(answer(pipe, limit_s=_START_S))


def serve_embedded(key: RunKey, pipe: Connection) -> None:
    """Serve the embedded coordinator until the pipe ends; send its address first."""
    server = EmbeddedServer(key)
    pipe.send(server.address)
    with contextlib.suppress(EOFError):
        pipe.recv()
    server.close()


@contextmanager
def _etcd(key: RunKey, folder: Path) -> Iterator[str]:
    with contextlib.closing(OwnEtcd(folder, size=1)) as own:
        yield own.address


_SERVING: Final = {"embedded": _embedded, "etcd": _etcd}


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print one line per coordinator and number of nodes."""
    console.print(by_line(figures, columns=_COLUMNS, cell=_cell))


def _cell(figure: Figure) -> str:
    if figure.unit == "s":
        return f"{figure.value:.2f} s"
    return f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:,.1f}"
