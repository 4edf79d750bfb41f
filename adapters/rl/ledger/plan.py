"""The shape of a job: which prompts a step trains on, and which versions may sample them. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.replay import ReplayConfig
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.samples.trajectory import Trajectory, TurnLimits


class Mode(StrEnum):
    """How training and sampling go along.

    ``SYNC``: step t trains on what version t sampled: they take turns. ``FIXED_LAG``: on what
    version max(0, t - eta) sampled; the outcome is a function of the configuration, bit for bit.
    ``BOUNDED``: samples go on under every new version, none of their tokens is by one older than
    max(0, t - eta).
    """

    SYNC = "sync"
    FIXED_LAG = "fixed_lag"
    BOUNDED = "bounded"


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the job: ``steps`` steps of ``groups`` prompts with ``group`` samples each.

    ``eta`` is the largest staleness, 0 in mode ``SYNC``; that of groups taken again is bounded by
    ``replay``.
    """

    groups: int
    group: int
    eta: int
    steps: int
    limits: TurnLimits
    mode: Mode = Mode.FIXED_LAG
    scheduling: Scheduling = Scheduling()
    replay: ReplayConfig = ReplayConfig()

    @property
    def fresh(self) -> int:
        """Number of groups of a step that were never trained on."""
        return self.groups - self.replay.reused(self.groups)

    @property
    def by_arrival(self) -> bool:
        """Whether steps take ordinals as they are complete."""
        return self.scheduling.order == GroupOrder.ARRIVAL

    @property
    def pinned(self) -> bool:
        """Whether a sample is of one version from its first token to its last."""
        return self.mode is not Mode.BOUNDED

    def step_of(self, ordinal: int) -> int:
        """Return the step (0-based) that trains on ``ordinal``."""
        return ordinal // self.fresh

    def oldest_at(self, step: int) -> int:
        """Return the oldest policy version that ``step`` may train on; when pinned, the one."""
        return max(0, step - self.eta)

    def version_of(self, ordinal: int) -> int:
        """Return the oldest policy version that may sample ``ordinal``; when pinned, the one."""
        return self.oldest_at(self.step_of(ordinal))

    def admitted(self, completed: int) -> int:
        """Return how many ordinals may be sampled once ``completed`` steps are done."""
        ahead = self.scheduling.ahead(groups=self.fresh, eta=self.eta)
        return min(self.fresh * (completed + 1) + ahead, self.fresh * self.steps)


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Work for a rollout worker: a sample to start or to go on with, by ``version`` or a newer."""

    version: int
    trajectory: Trajectory
