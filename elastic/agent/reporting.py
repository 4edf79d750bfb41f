"""A node's output for people and tools: its events, and the list of its processes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from holdfast.elastic.events import Event
from holdfast.elastic.events.log import HISTORY_BYTES, EventWriter, events_file
from holdfast.elastic.membership.records import Roster
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.processes.log_files import bound

_log = logging.getLogger(__name__)

PROCESSES_PATTERN = "processes-*.json"


class NodeProcesses(msgspec.Struct, frozen=True, kw_only=True):
    """The process ids of a node: 0 for a sidecar that is down; ``address`` is the sidecar's.

    ``fork_server`` is 0 without one.

    ``failure`` describes an error of a worker after it had completed its part of the job.
    ``stragglers`` describes slow workers by seat, on the one node that reports for all;
    ``data_troubles`` describes failures of its workers' data loading processes, and ``unreachable``
    names the nodes that it does not reach. ``progress`` grows with every step that is newly
    protected. ``held_off`` says why the node, which was lost before, is not let in yet.
    """

    agent: int
    sidecar: int
    address: str = ""
    workers: dict[str, int] = {}
    fork_server: int = 0
    failure: str = ""
    stragglers: dict[str, str] = {}
    data_troubles: dict[str, str] = {}
    unreachable: tuple[str, ...] = ()
    progress: int = -1
    held_off: str = ""


class Reporter:
    """Writes a node's events, and keeps its list of processes up to date."""

    def __init__(self, run_dir: Path, *, node: str, history_bytes: int = HISTORY_BYTES) -> None:
        """``history_bytes`` is the most that the node's events take, and each of its logs."""
        self._run_dir, self._node, self._most_bytes = run_dir, node, history_bytes // 2
        path = events_file(run_dir, node)
        self._events = EventWriter(path, node=node, history_bytes=history_bytes)
        self._processes: NodeProcesses | None = None
        self._refused = False

    def emit(self, event: Event) -> None:
        """Write an event of the agent's own."""
        self._events.write(event, source="agent")

    def relay(self, seat: str, event: Event) -> None:
        """Write an event of a worker, with the event's own time."""
        self._events.write(msgspec.structs.replace(event, seat=seat), source="worker")

    def list_processes(self, processes: NodeProcesses) -> None:
        """Replace the node's list if it has changed; on a full disk the old one stays for now."""
        if processes == self._processes:
            return
        path = processes_file(self._run_dir, self._node)
        fresh = path.with_suffix(".new")
        try:
            fresh.touch(mode=0o600)
            fresh.write_bytes(msgspec.json.encode(processes))
            fresh.replace(path)
        except OSError as error:
            if not self._refused:
                _log.warning("%s: the list of processes stays old: %s", path, error.strerror)
            self._refused = True
            return
        self._processes, self._refused = processes, False

    def bound_logs(self, seats: Iterable[str]) -> None:
        """Keep the logs of the node's sidecar and of its workers within their bound."""
        logs = self._run_dir / "logs"
        for name in (f"sidecar-{self._node}", *(seat.replace("/", "-") for seat in seats)):
            bound(logs / f"{name}.log", most_bytes=self._most_bytes)

    def close(self) -> None:
        """Close the event file."""
        self._events.close()


def processes_file(run_dir: Path, node: str) -> Path:
    """Return the file in which a node lists its processes."""
    return run_dir / f"processes-{node}.json"


def read_processes(run_dir: Path, node: str) -> NodeProcesses | None:
    """Return the node's list, None before it has written one."""
    try:
        data = processes_file(run_dir, node).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=NodeProcesses)


def read_all_processes(run_dir: Path) -> dict[str, NodeProcesses]:
    """Return the lists of all nodes that have written one."""
    prefix, suffix = PROCESSES_PATTERN.split("*")
    names = [path.name for path in sorted(run_dir.glob(PROCESSES_PATTERN))]
    nodes = [name.removeprefix(prefix).removesuffix(suffix) for name in names]
    return {node: found for node in nodes if (found := read_processes(run_dir, node))}


def public_roster(view: JobView) -> Roster:
    """Return the roster without inventories, which workers do not need: a tenth of the size."""
    roster = view.roster()
    nodes = tuple(msgspec.structs.replace(node, inventory=None) for node in roster.nodes)
    return Roster(nodes=nodes, generation=roster.generation)
