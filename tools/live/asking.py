"""Asks the sidecars of a running job for their status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.ckpt.errors import CkptError, NotFoundError, PeerError
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.reporting import NodeProcesses, read_all_processes
from holdfast.elastic.events import JobEnded, StateApproximate, decode
from holdfast.elastic.events.log import EVENTS_PATTERN, events_file
from holdfast.elastic.launch.run_folder import KEY
from holdfast.tools.show.node_status import NodeStatus

TIMEOUT_S: Final = 3.0
"""The time that a node has for its answer."""

AT_ONCE: Final = 32
"""The nodes that are asked at the same time."""


def ask(run_dir: Path) -> list[NodeStatus]:
    """Return the status of every node of the job in ``run_dir``.

    Raises ``NotFoundError`` if there is no job or it is over, and ``PeerError`` if no node answers.
    A single node that does not answer is in the list with the reason.
    """
    nodes = ask_all([run_dir])
    marks = _marks(run_dir, generation=max(node.generation for node in nodes))
    return [msgspec.structs.replace(nodes[0], approximate=marks), *nodes[1:]]


def ask_all(
    run_dirs: Sequence[Path],
    *,
    key: RunKey | None = None,
    members: Mapping[str, NodeProcesses] | None = None,
) -> list[NodeStatus]:
    """Return the status of every node of the job in ``run_dirs``, and of its ``members``.

    The arguments are as those of `sidecars`. Raises like `ask`.
    """
    place = ", ".join(map(str, run_dirs)) or "the coordinator"
    own, found = sidecars(run_dirs, key=key, members=members)
    endings = [_ending(run_dir) for run_dir in run_dirs]
    if endings and all(endings) and not members:
        raise NotFoundError(f"{place}: the job is over ({endings[-1]}); events and logs are there")
    if not found:
        raise NotFoundError(f"{place}: the job is starting, no node has a sidecar yet; try again")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        nodes = list(pool.map(lambda item: _ask_node(*item, key=own), found.items()))
    if not any(node.status for node in nodes):
        errors = "; ".join(f"{node.node}: {node.error}" for node in nodes)
        raise PeerError(f"{place}: no sidecar answers, the job was killed or stopped ({errors})")
    return nodes


def _marks(run_dir: Path, *, generation: int) -> str:
    """Return the marks of the model that a generation trains, "" for none.

    Every generation tells the marks of its state, so older ones do not count.
    """
    found: list[str] = []
    for file in sorted(run_dir.glob(EVENTS_PATTERN)):
        for line in file.read_bytes().splitlines():
            if b'"kind":"approximate"' not in line:
                continue
            match decode(line):
                case StateApproximate(generation=told, text=text) if told == generation:
                    found.append(text)
    return "; ".join(dict.fromkeys(found))


def sidecars(
    run_dirs: Sequence[Path],
    *,
    key: RunKey | None = None,
    members: Mapping[str, NodeProcesses] | None = None,
) -> tuple[RunKey, dict[str, NodeProcesses]]:
    """Return the job's key, and the processes of its nodes by name.

    ``members`` are the nodes by their records at the coordinator, None if it is not asked: it says
    which are there and at which address, their directories say the rest. ``key`` is the job's, by
    default that in the directories. Raises ``NotFoundError`` if there is none.
    """
    listed: dict[str, NodeProcesses] = {}
    for run_dir in run_dirs:
        listed |= read_all_processes(run_dir)
    if members is not None:
        listed = {
            name: msgspec.structs.replace(listed.get(name, each), address=each.address)
            for name, each in members.items()
        }
    if key is None:
        key = key_of(next((each for each in run_dirs if (each / KEY).exists()), run_dirs[0]))
    return key, listed


def key_of(run_dir: Path) -> RunKey:
    """Return the key of the job in ``run_dir``. Raises ``NotFoundError`` if there is none."""
    if not run_dir.is_dir():
        raise NotFoundError(
            f"{run_dir}: no such directory; give the directory that `holdfast run --run-dir` got"
        )
    path = run_dir / KEY
    if not path.exists():
        raise NotFoundError(
            f"{run_dir}: no job was started here (there is no key.json); give the directory that "
            "`holdfast run --run-dir` got"
        )
    return RunKey.load(path)


def _ending(run_dir: Path) -> str | None:
    """Return how the job ended, None while it runs."""
    try:
        lines = events_file(run_dir, "launcher").read_bytes().splitlines()
    except FileNotFoundError:
        return None
    match decode(lines[-1]) if lines else None:
        case JobEnded(message=message):
            return message or "completed"
        case _:
            return None


def _ask_node(node: str, found: NodeProcesses, *, key: RunKey) -> NodeStatus:
    status: dict[str, Any] = {}
    error = None
    if not found.address:
        error = "its sidecar is down; its agent starts another"
    else:
        client = SidecarClient(found.address, key, timeout_s=TIMEOUT_S)
        try:
            status = client.status()
        except CkptError as failed:
            error = str(failed)
        finally:
            client.close()
    return NodeStatus(
        node=node,
        sidecar=found.sidecar,
        workers=found.workers,
        status=status,
        error=error,
        stragglers=found.stragglers,
        data_troubles=found.data_troubles,
        unreachable=found.unreachable,
        held_off=found.held_off,
    )
