"""The numbers that describe a planned job, each checked when it is made. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from holdfast.ckpt import checks
from holdfast.ckpt.parity.groups import GROUP_SIZE
from holdfast.elastic.errors import ConfigError

Parity: TypeAlias = int | Literal["replicate"]

MEMORY_SPEED: Final = 10e9
"""Bytes per second at which a node copies its memory, where nothing is given."""

SNAPSHOT_COPIES, CHECKPOINT_COPIES = 1.0, 3.0
"""Training time that a snapshot and a checkpoint cost, in times that the node's state is copied.

`holdfast bench lost` measures both: about one copy, and two more where it is also persisted.
"""

_FINITE: Final = 1e18


def _above(unit: str) -> checks.Rule:
    return checks.number(0, _FINITE, above=True, remedy=f"give a number of {unit} above 0")


def _from_zero(unit: str) -> checks.Rule:
    return checks.number(0, _FINITE, remedy=f"give 0 or more {unit}")


_RULES: Final[Mapping[str, checks.Rule]] = {
    "state_bytes": checks.count(1, remedy="give the size of the whole training state"),
    "nodes": checks.count(1, remedy="give 1 or more nodes"),
    "workers": checks.count(1, remedy="give 1 or more workers"),
    "step_s": _above("seconds"),
    "node_mtbf_s": _above("seconds"),
    "worker_mtbf_s": checks.optional(_above("seconds")),
    "racks": checks.count(0, remedy="give the number of racks, 0 for none"),
    "rack_mtbf_s": checks.optional(_above("seconds")),
    "feeds": checks.count(0, remedy="give the number of power feeds, 0 for none"),
    "feed_mtbf_s": checks.optional(_above("seconds")),
    "outage_mtbf_s": checks.optional(_above("seconds")),
    "parity": checks.either(
        "replicate", checks.count(0, remedy="give the nodes that may be lost, or 'replicate'")
    ),
    "group": checks.count(2, remedy="give 2 or more nodes"),
    "keep": checks.count(1, remedy="give 1 or more snapshots"),
    "moving": checks.number(0, 1, above=True, remedy="give a share above 0, at most 1"),
    "network": _above("bytes per second"),
    "disk": _above("bytes per second"),
    "store": checks.optional(_above("bytes per second")),
    "memory_speed": _above("bytes per second"),
    "snapshot_cost_s": checks.optional(_from_zero("seconds")),
    "checkpoint_cost_s": checks.optional(_from_zero("seconds")),
    "protect_s": checks.optional(_from_zero("seconds")),
    "recovery_s": _from_zero("seconds"),
    "restart_s": _from_zero("seconds"),
    "useful_s": _above("seconds"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job as a planner sees it: sizes in bytes, rates in bytes per second, times in seconds.

    ``state_bytes`` is the tracked state of the whole job, each byte once. A share ``moving`` of it
    changes from step to step. Each of ``nodes`` has ``workers`` and fails by itself once in
    ``node_mtbf_s`` (mean time between failures); a worker process once in ``worker_mtbf_s``; each
    of ``racks`` with all of its nodes once in ``rack_mtbf_s``, each of ``feeds`` (power feeds, each
    of several racks) once in ``feed_mtbf_s``, and the whole job with all memory once in
    ``outage_mtbf_s``. ``network`` and ``disk`` are rates
    of one node, ``store`` is the rate of the checkpoint store for all nodes together.
    ``snapshot_cost_s`` and ``checkpoint_cost_s`` are the training time that one of them takes, and
    ``protect_s`` the time from the end of a step to its protection (None: estimated from the
    rates). ``recovery_s`` is a recovery from memory without its transfers, ``restart_s`` one from
    the store. The job has ``useful_s`` of work, which is the time that it takes if nothing fails
    and nothing is saved.
    """

    state_bytes: int
    nodes: int
    workers: int = 8
    step_s: float
    node_mtbf_s: float
    worker_mtbf_s: float | None = None
    racks: int = 0
    rack_mtbf_s: float | None = None
    feeds: int = 0
    feed_mtbf_s: float | None = None
    outage_mtbf_s: float | None = None
    parity: Parity = 1
    group: int = GROUP_SIZE
    keep: int = 1
    moving: float = 1.0
    network: float = 1.25e9
    disk: float = 2e9
    store: float | None = None
    memory_speed: float = MEMORY_SPEED
    snapshot_cost_s: float | None = None
    checkpoint_cost_s: float | None = None
    protect_s: float | None = None
    recovery_s: float = 20.0
    restart_s: float = 600.0
    useful_s: float = 30 * 86400.0

    def __post_init__(self) -> None:
        checks.check_fields(self, _RULES, error=ConfigError)
        if self.nodes < self.lost_with_memory + 1:
            raise ConfigError(
                f"PlannedJob(nodes={self.nodes}, parity={self.parity!r}): a group needs more nodes "
                "than may be lost of it; give more nodes, or less parity"
            )
        if self.group <= self.lost_with_memory:
            raise ConfigError(
                f"PlannedJob(group={self.group}, parity={self.parity!r}): a group needs more nodes "
                f"than may be lost of it; give group={self.lost_with_memory + 1} or more"
            )
        if self.racks > self.nodes:
            raise ConfigError(
                f"PlannedJob(racks={self.racks}): there are {self.nodes} nodes; give no more racks"
            )
        if bool(self.racks) != (self.rack_mtbf_s is not None):
            raise ConfigError(
                "PlannedJob(racks=..., rack_mtbf_s=...): give both, or neither of them"
            )
        if self.feeds > (self.racks or self.nodes):
            raise ConfigError(
                f"PlannedJob(feeds={self.feeds}): there are {self.racks or self.nodes} "
                f"{'racks' if self.racks else 'nodes'}; give no more feeds"
            )
        if bool(self.feeds) != (self.feed_mtbf_s is not None):
            raise ConfigError(
                "PlannedJob(feeds=..., feed_mtbf_s=...): give both, or neither of them"
            )

    @property
    def lost_with_memory(self) -> int:
        """The nodes of a group that may be lost at once while its memory stays whole."""
        return 1 if self.parity == "replicate" else self.parity

    @property
    def node_bytes(self) -> float:
        """The state of a node."""
        return self.state_bytes / self.nodes

    @property
    def rank_bytes(self) -> int:
        """The state of the largest rank."""
        return max(math.ceil(self.node_bytes / self.workers), 1)

    @property
    def copy_s(self) -> float:
        """Time in which a node copies the part of its state that changes."""
        return self.node_bytes * self.moving / self.memory_speed

    @property
    def snapshot_s(self) -> float:
        """Training time that a snapshot takes."""
        given = self.snapshot_cost_s
        return SNAPSHOT_COPIES * self.copy_s if given is None else given

    @property
    def protection_s(self) -> float:
        """Time from the end of a step until its snapshot is protected."""
        if self.protect_s is not None:
            return self.protect_s
        sent = self.lost_with_memory * self.node_bytes * self.moving
        return self.copy_s + sent / self.network

    @property
    def store_rate(self) -> float:
        """Bytes per second that a node reads from the checkpoint store or writes to it."""
        share = math.inf if self.store is None else self.store / self.nodes
        return min(self.disk, share)

    @property
    def persist_s(self) -> float:
        """Time in which all nodes write a checkpoint, beside training."""
        return self.node_bytes / self.store_rate

    @property
    def checkpoint_s(self) -> float:
        """Training time that a checkpoint takes."""
        if self.checkpoint_cost_s is not None:
            return self.checkpoint_cost_s
        return CHECKPOINT_COPIES * self.node_bytes / self.memory_speed

    @property
    def return_s(self) -> float:
        """Time of a recovery from memory: a lost node's state is read from others and rebuilt."""
        return self.recovery_s + self.node_bytes / self.network

    @property
    def reload_s(self) -> float:
        """Time of a restart from the newest checkpoint."""
        return self.restart_s + self.node_bytes / self.store_rate
