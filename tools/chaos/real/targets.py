"""Choice of a strike's victims among the living parts of a job."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.elastic.membership.view import role_of
from holdfast.tools.chaos.scenarios.catalogue import CATALOGUE, Part

if TYPE_CHECKING:
    from holdfast.tools.chaos.faults.injector import Victim
    from holdfast.tools.chaos.real.seen import JobProgress
    from holdfast.tools.chaos.scenarios.scenario import StrikeTarget
    from holdfast.tools.chaos.scenarios.strikes import Strike

PLAIN: Final[tuple[Part, ...]] = ("worker", "job", "store")
"""Parts that can be hit in a job without Holdfast."""

_ON_NODES: Final[tuple[Part, ...]] = ("worker", "sidecar", "agent", "node", "environment")


def part_of(strike: Strike, *, nodes: bool) -> Part | None:
    """Return the part to hit in a job with or without ``nodes``; None if the job lacks it."""
    if strike.target.part is not None:
        parts: tuple[Part, ...] = (strike.target.part,)
    else:
        parts = CATALOGUE[strike.kind].parts
    return next((part for part in parts if nodes or part in PLAIN), None)


def choose(
    strike: Strike, victims: Sequence[Victim], *, workers: Sequence[Victim], seen: JobProgress
) -> list[Victim]:
    """Return the victims of a strike among ``victims``; empty if nothing matches.

    ``workers`` are all living workers: a node has the roles and ranks of its workers.
    """
    target = strike.target
    homes = {each.seat: each.node for each in workers}
    found = [each for each in victims if _fits(each, target, homes, seen)]
    if target.which == "all":
        return found
    if target.which == "slowest":
        found.sort(key=lambda each: (-_slowness(each, homes, seen), each.name))
        return found[: target.count]
    if target.which == "leader":
        return _leaders(found, seen)[: target.count]
    if not found:
        return []
    if target.count == 1:
        return [found[min(int(strike.pick * len(found)), len(found) - 1)]]
    return random.Random(strike.pick).sample(found, min(target.count, len(found)))


def _fits(each: Victim, target: StrikeTarget, homes: Mapping[str, str], seen: JobProgress) -> bool:
    if each.part not in _ON_NODES:
        return not (each.node and target.nodes) or each.node in target.nodes
    seats = _seats(each, homes)
    if target.nodes and each.node not in target.nodes:
        return False
    if target.role is not None and not any(role_of(seat) == target.role for seat in seats):
        return False
    return target.rank is None or any(seen.ranks.get(seat) == target.rank for seat in seats)


def _seats(each: Victim, homes: Mapping[str, str]) -> list[str]:
    """Return a worker's own seat, or the seats on a node."""
    if each.seat:
        return [each.seat]
    return [seat for seat, node in homes.items() if node == each.node]


def _leaders(found: Sequence[Victim], seen: JobProgress) -> list[Victim]:
    """Return the victims on the leading node, lowest rank first.

    Without nodes, the lowest rank leads.
    """
    lowest = min((each.node for each in found), default="")
    node = seen.leader if any(each.node == seen.leader for each in found) else lowest
    there = [each for each in found if each.node == node]
    return sorted(there, key=lambda each: (seen.ranks.get(each.seat, 0), each.name))


def _slowness(each: Victim, homes: Mapping[str, str], seen: JobProgress) -> float:
    return max((seen.step_seconds(seat) for seat in _seats(each, homes)), default=0.0)
