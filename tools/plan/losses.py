"""The rate at which memory loses steps: a group loses more nodes than parity makes good. Pure.

A group of ``n`` nodes is a Markov chain whose state is the number of nodes that are lost and not
yet made good. Nodes fail at the rate ``1 / MTBF`` each; racks with all their nodes of the group. A
recovery makes all losses good at once, for the survivors form new groups and protect the next step.
The chain is absorbed where more than ``parity`` nodes are lost. (The model of the reliability of
disk arrays: Gibson and Patterson, "Designing Disk Arrays for High Data Reliability", 1993; here the
repair of a group is one act, not one for each disk.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from holdfast.ckpt.parity.groups import form_groups
from holdfast.tools.plan.job import PlannedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChain:
    """One parity group: its nodes, the failures it survives, and rates per second.

    ``partners`` is the number of nodes whose loss beside the first one counts (of whole copies,
    only the neighbours). ``racks`` maps numbers of nodes to the rate at which racks with so many
    nodes of the group fail.
    """

    nodes: int
    parity: int
    node_rate: float
    repair_rate: float
    partners: int
    racks: tuple[tuple[int, float], ...] = ()

    def _leaving(self, lost: int) -> list[tuple[int, float]]:
        """Return the failures from a state: nodes lost then, and the rate."""
        left = self.nodes if lost == 0 else max(self.partners - (lost - 1), 0)
        alone = [(lost + 1, left * self.node_rate)]
        return alone + [(lost + count, rate) for count, rate in self.racks]

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
    those of the whole job. ``fatal_racks`` is the number of racks whose loss no memory survives.
    """

    soft: float
    lost: float
    outage: float = 0.0
    fatal_racks: int = 0

    @property
    def hard(self) -> float:
        """The failures from which only a checkpoint leads back."""
        return self.lost + self.outage


def failure_rates(job: PlannedJob, *, window_s: float) -> FailureRates:
    """Return the rates of a job whose losses are made good within ``window_s``."""
    node_rate, rack_rate = _rate(job.node_mtbf_s), _rate(job.rack_mtbf_s)
    workers = job.nodes * job.workers * _rate(job.worker_mtbf_s)
    every = job.nodes * node_rate + job.racks * rack_rate
    outage = _rate(job.outage_mtbf_s)
    if job.lost_with_memory == 0:
        return FailureRates(soft=workers, lost=every, outage=outage, fatal_racks=job.racks)
    shapes = group_shapes(job)
    fatal = {rack for _, held in shapes for rack, n in held if n > job.lost_with_memory}
    chains: Counter[LossChain] = Counter()
    for size, held in shapes:
        counts = Counter(count for rack, count in held if rack not in fatal)
        chains[
            LossChain(
                nodes=size,
                parity=job.lost_with_memory,
                node_rate=node_rate,
                repair_rate=1.0 / window_s,
                partners=min(2, size - 1) if job.parity == "replicate" else size - 1,
                racks=tuple(sorted((n, k * rack_rate) for n, k in counts.items())),
            )
        ] += 1
    lost = sum(chain.loss_rate() * count for chain, count in chains.items())
    lost = min(lost + len(fatal) * rack_rate, every)
    return FailureRates(
        soft=every - lost + workers, lost=lost, outage=outage, fatal_racks=len(fatal)
    )


def _rate(mtbf_s: float | None) -> float:
    return 1.0 / mtbf_s if mtbf_s else 0.0


Shape = tuple[int, tuple[tuple[str, int], ...]]


def group_shapes(job: PlannedJob) -> Sequence[Shape]:
    """Return the size of each parity group, and how many of its nodes each rack has."""
    return _shapes(
        job.nodes, job.racks, job.lost_with_memory, job.group, int(job.parity == "replicate")
    )


@cache
def _shapes(nodes: int, racks: int, parity: int, size: int, columns: int) -> Sequence[Shape]:
    names = [f"{number:07}" for number in range(nodes)]
    domains: Mapping[str, str] = {
        name: f"rack {number * racks // nodes}" if racks else ""
        for number, name in enumerate(names)
    }
    groups, _ = form_groups(domains, parity=parity, size=size, columns=columns)
    return tuple(
        (len(group), tuple(sorted(Counter(domains[n] for n in group if domains[n]).items())))
        for group in groups
    )
