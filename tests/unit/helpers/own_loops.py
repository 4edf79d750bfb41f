"""A stand-in for a run, and a custom loop whose samples are noise."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from holdfast.adapters.rl.library import BatchPlan, Mode, Rollouts, Sample, TurnLimits
from holdfast.ckpt.errors import NotFoundError
from holdfast.elastic.events import Event
from holdfast.elastic.membership.records import Member

LIMITS = TurnLimits(end=9, context=12, max_new_tokens=4)
PLAN = BatchPlan(groups=2, group=2, eta=0, steps=4, limits=LIMITS, mode=Mode.SYNC)


class Logs:
    """Record logs that outlive their writer, and a trainer whose steps are protected."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], dict[int, bytes]] = {}
        self.ends: dict[tuple[str, str], int] = {}
        self.node, self.protected, self.dropped = "n0", 99, list[str]()

    def log_open(self, name: str) -> int:
        self.records.setdefault((self.node, name), {})
        return self.ends.setdefault((self.node, name), 0)

    def log_append(self, name: str, records: list[bytes]) -> int:
        key = (self.node, name)
        for record in records:
            self.records[key][self.ends[key]] = record
            self.ends[key] += 1
        return self.ends[key]

    def log_truncate(self, name: str, keep_from: int) -> None:
        log = self.records[self.node, name]
        self.records[self.node, name] = {i: r for i, r in log.items() if i >= keep_from}

    def log_read(self, name: str, *, node: str) -> list[bytes]:
        try:
            return list(self.records[node, name].values())
        except KeyError:
            raise NotFoundError(f"no log {name} of {node}") from None

    def log_drop(self, name: str, *, node: str) -> None:
        self.dropped.append(name)
        self.records.pop((node, name), None)

    def protected_step(self, **_: Any) -> int:
        return self.protected


class Job:
    """A run of one rank, or as ``world`` says, whose process can be replaced.

    ``snapshot`` is its tracked state.
    """

    def __init__(self, plan: BatchPlan = PLAN) -> None:
        self.plan, self.logs, self.snapshot, self.world = plan, Logs(), "", dict[str, Any]()
        self.generation, self.completed = 0, 0
        self.events: list[Event] = []

    def enter(self, process: str, *, node: str = "n0", **options: Any) -> Rollouts:
        """Begin a generation, as the training function does, up to its first snapshot."""
        self.generation += 1
        self.logs.node = node
        member = Member(rank=0, seat="trainer/0", node=node, incarnation=process)
        session = SimpleNamespace(
            seed=3,
            members=self.world.get("members", (member,)),
            sidecar=self.logs,
            emit=self.events.append,
        )
        facts: dict[str, Any] = {
            "rank": 0,
            "is_leader": True,
            "world_size": 1,
            "generation": self.generation,
            "completed": self.completed,
            "check": lambda: None,
            "_session": session,
        }
        self.run: Any = SimpleNamespace(**(facts | self.world))
        rollouts = Rollouts(self.run, self.plan, lambda ordinal: (1, ordinal), **options)
        if self.snapshot:
            rollouts.load_state_dict(json.loads(self.snapshot))
        self.keep(rollouts)
        return rollouts

    def keep(self, rollouts: Rollouts) -> None:
        self.snapshot = json.dumps(rollouts.state_dict())

    def step(self, rollouts: Rollouts) -> list[Any]:
        """Sample the missing samples, train, and snapshot."""
        for sample in rollouts.samples():
            finish(sample)
        batch = rollouts.batch()
        self.completed = self.run.completed = self.run.completed + 1
        self.keep(rollouts)
        return batch


def finish(sample: Sample, *, most: int = 99) -> int:
    """Sample, from the noise alone, up to ``most`` tokens; return how many."""
    count = 0
    while not sample.finished and count < most:
        token = sample.draw(torch.zeros(10))
        sample.extend([token], [-0.1 * (token + 1)])
        count += 1
    return count
