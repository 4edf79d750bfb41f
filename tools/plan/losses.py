"""The rate at which memory loses steps: a group loses more nodes than parity makes good. Pure.

A group of ``n`` nodes is a Markov chain whose state is the number of nodes that are lost and not
yet made good. Nodes fail at the rate ``1 / MTBF`` each; racks and feeds with all their nodes. A
recovery makes all losses good at once, for the survivors form new groups and protect the next step.
The chain is absorbed where more than ``parity`` nodes are lost. (The model of the reliability of
disk arrays: Gibson and Patterson, "Designing Disk Arrays for High Data Reliability", 1993; here the
repair of a group is one act, not one for each disk.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeAlias

from holdfast.ckpt.parity.groups import form_groups
from holdfast.tools.plan.job import PlannedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChain:
    """One parity group: its nodes, the failures it survives, and rates per second.

    ``partners`` is the number of nodes whose loss beside the first one counts (of whole copies,
    only the neighbours). ``domains`` maps numbers of nodes to the rate at which racks and power
    feeds with so many nodes of the group fail.
    """

    nodes: int
    parity: int
    node_rate: float
    repair_rate: float
    partners: int
    domains: tuple[tuple[int, float], ...] = ()

    def _leaving(self, lost: int) -> list[tuple[int, float]]:
        """Return the failures from a state: nodes lost then, and the rate."""
        left = self.nodes if lost == 0 else max(self.partners - (lost - 1), 0)
        alone = [(lost + 1, left * self.node_rate)]
        return alone + [(lost + count, rate) for count, rate in self.domains]

    def loss_rate(self) -> float:
        """Return losses per second: one over the expected time until the chain is absorbed.

        With ``C(k)`` the chance of being absorbed before all is made good again, and ``A(k)`` the
        expected time until either, from ``k`` lost nodes: a cycle from whole to whole or to loss
        takes ``1 / rate(0) + sum p A``, and ends in loss with ``sum p C``.
        """
        chances: dict[int, float] = {}
        times: dict[int, float] = {}
        for lost in range(self.parity, 0, -1):
            failures = self._leaving(lost)
            total = sum(rate for _, rate in failures) + self.repair_rate
            chances[lost] = sum(r * chances.get(to, 1.0) for to, r in failures) / total
            times[lost] = (1.0 + sum(r * times.get(to, 0.0) for to, r in failures)) / total
        first = self._leaving(0)
        total = sum(rate for _, rate in first)
        if not total:
            return 0.0
        chance = sum(rate * chances.get(to, 1.0) for to, rate in first) / total
        cycle_s = (1.0 + sum(rate * times.get(to, 0.0) for to, rate in first)) / total
        return chance / cycle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRates:
    """Failures per second: those that memory makes good, and those that only a checkpoint does.

    Of the second kind, ``lost`` are losses of more nodes than parity makes good, and ``outage``
    those of the whole job. ``fatal_racks`` and ``fatal_feeds`` are the numbers of racks and of
    power feeds whose loss no memory survives.
    """

    soft: float
    lost: float
    outage: float = 0.0
    fatal_racks: int = 0
    fatal_feeds: int = 0

    @property
    def hard(self) -> float:
        """The failures from which only a checkpoint leads back."""
        return self.lost + self.outage


def failure_rates(job: PlannedJob, *, window_s: float) -> FailureRates:
    """Return the rates of a job whose losses are made good within ``window_s``."""
    node_rate, rates = _rate(job.node_mtbf_s), (_rate(job.feed_mtbf_s), _rate(job.rack_mtbf_s))
    workers = job.nodes * job.workers * _rate(job.worker_mtbf_s)
    every = job.nodes * node_rate + job.feeds * rates[0] + job.racks * rates[1]
    outage = _rate(job.outage_mtbf_s)
    if job.lost_with_memory == 0:
        return FailureRates(
            soft=workers,
            lost=every,
            outage=outage,
            fatal_racks=job.racks,
            fatal_feeds=job.feeds,
        )
    shapes = group_shapes(job)
    fatal = {
        (kind, name) for _, held in shapes for kind, name, n in held if n > job.lost_with_memory
    }
    chains: Counter[LossChain] = Counter()
    for size, held in shapes:
        shared: dict[int, float] = defaultdict(float)
        for kind, name, count in held:
            if (kind, name) not in fatal:
                shared[count] += rates[kind]
        chains[
            LossChain(
                nodes=size,
                parity=job.lost_with_memory,
                node_rate=node_rate,
                repair_rate=1.0 / window_s,
                partners=min(2, size - 1) if job.parity == "replicate" else size - 1,
                domains=tuple(sorted(shared.items())),
            )
        ] += 1
    lost = sum(chain.loss_rate() * count for chain, count in chains.items())
    fatal_of = [sum(kind == wanted for kind, _ in fatal) for wanted in (FEED, RACK)]
    lost = min(lost + sum(n * rate for n, rate in zip(fatal_of, rates, strict=True)), every)
    return FailureRates(
        soft=every - lost + workers,
        lost=lost,
        outage=outage,
        fatal_feeds=fatal_of[FEED],
        fatal_racks=fatal_of[RACK],
    )


def _rate(mtbf_s: float | None) -> float:
    return 1.0 / mtbf_s if mtbf_s else 0.0


FEED: Final = 0
RACK: Final = 1

Shape: TypeAlias = tuple[int, tuple[tuple[int, int, int], ...]]
"""The size of a parity group; of each domain in it the kind, the number, and its nodes here."""


def group_shapes(job: PlannedJob) -> Sequence[Shape]:
    """Return the shape of each parity group that Holdfast would form.

    Nodes are numbered rack by rack, racks feed by feed, with as many in each.
    """
    columns = int(job.parity == "replicate")
    return _shapes(job.nodes, (job.feeds, job.racks), job.lost_with_memory, job.group, columns)


@cache
def _shapes(
    nodes: int, domains: tuple[int, int], parity: int, size: int, columns: int
) -> Sequence[Shape]:
    feeds, racks = domains
    places: dict[str, tuple[tuple[int, int], ...]] = {}
    for number in range(nodes):
        unit, units = (number * racks // nodes, racks) if racks else (number, nodes)
        feed = ((FEED, unit * feeds // units),) if feeds else ()
        places[f"{number:07}"] = (*feed, (RACK, unit)) if racks else feed
    labels = {name: "/".join(f"{unit:07}" for _, unit in place) for name, place in places.items()}
    groups, _ = form_groups(labels, parity=parity, size=size, columns=columns)
    return tuple(
        (
            len(group),
            tuple(
                (kind, unit, count)
                for (kind, unit), count in sorted(
                    Counter(each for node in group for each in places[node]).items()
                )
            ),
        )
        for group in groups
    )
