"""The view of an agent that follows: the job's own keys, and stand-ins for other nodes. Pure.

The records of other nodes are made from the generation's record: they are as its members have to
be. Workers learn from them who the others are, and where their sidecars serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.elastic.membership.incremental import while_same
from holdfast.elastic.membership.records import (
    GenerationRecord,
    JobSpec,
    NodeRecord,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView


def following(view: JobView, own: NodeRecord) -> JobView:
    """Return the view of the agent of one node from one of the keys of `view.job_prefix` alone."""
    nodes = {**stand_ins(view), own.node: own}
    found = replace(view, nodes=nodes)
    found.findings.inherit_whole(view.findings)
    return found


def _is_over(view: JobView) -> bool:
    generation, bulletin = view.generation, view.bulletin
    return bulletin is not None and generation is not None and bulletin.over >= generation.number


@while_same(lambda view: (view.generation, _is_over(view)))
def stand_ins(generation: GenerationRecord | None, over: bool) -> Mapping[str, NodeRecord]:
    """Return a record for every node of the newest generation, without inventory and slots.

    Its trainers are ACTIVE until a bulletin says that the generation is over. In a later stage
    their specs tell its number alone: a worker that starts must not begin with the first stage.
    """
    if generation is None:
        return {}
    stage = generation.snapshots.stage
    spec = JobSpec(stage=stage) if stage else None
    workers: dict[str, list[WorkerRecord]] = {}
    for member in generation.members:
        workers.setdefault(member.node, []).append(
            WorkerRecord(
                seat=member.seat,
                incarnation=member.incarnation,
                pid=0,
                state=WorkerState.READY if over else WorkerState.ACTIVE,
                ready_after=generation.number if over else 0,
                spec=spec,
                info=member.info,
            )
        )
    sidecars = {peer.node: peer.address for peer in generation.snapshots.peers}
    return {
        name: NodeRecord(
            node=name,
            incarnation=mark.rpartition("/")[0],
            domain="",
            sidecar=sidecars.get(name, ""),
            slots={},
            workers=tuple(workers.get(name, ())),
            fenced=generation.number - (not over),
            sidecar_starts=int(mark.rpartition("/")[2]),
        )
        for name, mark in sorted(generation.nodes.items())
    }
