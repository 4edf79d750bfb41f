"""The facts of a running job's nodes, from the answers of their sidecars."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from holdfast.ckpt.errors import NotFoundError, PeerError
from holdfast.tools.doctor.facts import UNLIMITED, JobNode
from holdfast.tools.doctor.findings import Finding, failure, fine
from holdfast.tools.doctor.job import judge_job
from holdfast.tools.live.asking import ask
from holdfast.tools.show.node_status import NodeStatus


def examine_job(run_dir: Path) -> tuple[list[Finding], list[NodeStatus]]:
    """Return the findings about the job in a run directory, and its nodes' answers.

    Raises ``NotFoundError`` if there is no such directory.
    """
    if not run_dir.is_dir():
        raise NotFoundError(
            f"{run_dir}: no such directory; give the one that `holdfast run --run-dir` got"
        )
    began_s, began_wall_s = time.monotonic(), time.time()
    try:
        nodes = ask(run_dir)
    except NotFoundError as error:
        return [fine("job", f"none runs here: {error}")], []
    except PeerError as error:
        return [
            failure(
                "job",
                str(error),
                why="nobody keeps its snapshots",
                remedy=f"the same `holdfast run --run-dir {run_dir}` continues from the newest "
                "checkpoint; `holdfast logs` shows how it ended",
            )
        ], []
    half_s = (time.monotonic() - began_s) / 2
    facts = [facts_of(node, now_s=began_wall_s + half_s, unsure_s=half_s) for node in nodes]
    return judge_job(facts), nodes


def facts_of(node: NodeStatus, *, now_s: float, unsure_s: float) -> JobNode:
    """Return the facts of a node that answered at ``now_s`` of this machine's wall clock."""
    machine: dict[str, Any] = node.status.get("machine", {})
    time_s = machine.get("time_s")
    return JobNode(
        node=node.node,
        error=node.error or "",
        troubles=() if node.error else tuple(node.troubles()),
        versions=machine.get("versions", {}),
        skew_s=None if time_s is None else time_s - now_s,
        unsure_s=unsure_s,
        mode=str(node.memory.get("mode", "")),
        need_bytes=int(node.memory.get("need_bytes", 0)),
        held_bytes=node.nbytes("slots") + node.nbytes("parity"),
        budget_bytes=node.nbytes("budget"),
        shared_free_bytes=int(machine.get("shared_free_bytes", UNLIMITED)),
    )
