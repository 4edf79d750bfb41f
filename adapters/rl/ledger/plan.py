"""The shape of a job: a step's prompts, and the versions that may sample them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.replay import ReplayConfig
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.samples.trajectory import Trajectory, TurnLimits
from holdfast.ckpt import checks
from holdfast.ckpt.errors import ArgumentError


class Mode(StrEnum):
    """The relation between training and sampling.

    ``SYNC``: step t trains on samples of version t, so training and sampling take turns.
    ``FIXED_LAG``: step t trains on samples of version max(0, t - eta); the result is a function of
    the configuration, bit for bit. ``BOUNDED``: samples continue under every new version; none of
    their tokens is by a version older than max(0, t - eta).
    """

    SYNC = "sync"
    FIXED_LAG = "fixed_lag"
    BOUNDED = "bounded"


_RULES: Final[Mapping[str, checks.Rule]] = {
    "groups": checks.count(1, remedy="give 1 or more prompts"),
    "group": checks.count(1, remedy="give 1 or more samples"),
    "eta": checks.count(0, remedy="give 0 or more steps"),
    "steps": checks.count(0, remedy="give 0 or more steps"),
    "limits": checks.instance(TurnLimits, remedy="give TurnLimits"),
    "mode": checks.instance(Mode, remedy="give Mode.SYNC, Mode.FIXED_LAG or Mode.BOUNDED"),
    "scheduling": checks.instance(Scheduling, remedy="give a Scheduling"),
    "replay": checks.instance(ReplayConfig, remedy="give a ReplayConfig"),
}


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the job: ``steps`` steps of ``groups`` prompts with ``group`` samples each.

    ``eta`` is the largest staleness, 0 in mode ``SYNC``; that of reused groups is bounded by
    ``replay``. Raises ``ArgumentError`` for numbers that no job can have, and for what the mode
    excludes.
    """

    groups: int
    group: int
    eta: int
    steps: int
    limits: TurnLimits
    mode: Mode = Mode.FIXED_LAG
    scheduling: Scheduling = Scheduling()
    replay: ReplayConfig = ReplayConfig()

    def __post_init__(self) -> None:
        checks.check_fields(self, _RULES, error=ArgumentError)
        if self.mode is Mode.SYNC and self.eta:
            raise ArgumentError(f"BatchPlan(eta={self.eta}): give 0 in mode {self.mode.value!r}")
        self.scheduling.check(mode=self.mode.value, eta=self.eta)

    @property
    def fresh(self) -> int:
        """Number of groups of a step that were never trained on."""
        return self.groups - self.replay.reused(self.groups)

    @property
    def by_arrival(self) -> bool:
        """True if steps take ordinals as they become complete."""
        return self.scheduling.order == GroupOrder.ARRIVAL

    @property
    def skips(self) -> bool:
        """True if groups whose rewards are all equal are not trained."""
        return self.scheduling.skip_equal is not None

    @property
    def pinned(self) -> bool:
        """True if one version samples all tokens of a sample."""
        return self.mode is not Mode.BOUNDED

    def step_of(self, ordinal: int) -> int:
        """Return the step (0-based) that trains on ``ordinal``."""
        return ordinal // self.fresh

    def oldest_at(self, step: int) -> int:
        """Return the oldest policy version that ``step`` may train on; when pinned, the only."""
        return max(0, step - self.eta)

    def oldest_from(self, step: int) -> int:
        """Return the oldest policy version that ``step`` or a later one may train on again."""
        kept = self.replay.max_age if self.replay.reused(self.groups) else 0
        return max(0, self.oldest_at(step) - kept)

    def version_of(self, ordinal: int) -> int:
        """Return the oldest policy version that may sample ``ordinal``; when pinned, the only."""
        return self.oldest_at(self.step_of(ordinal))

    def admitted(self, completed: int, *, taken: int | None = None) -> int:
        """Return how many ordinals may be sampled once ``completed`` steps are done.

        Those steps took ``taken`` ordinals; None: as many as they trained on.
        """
        ahead = self.scheduling.ahead(groups=self.fresh, eta=self.eta)
        more = min(self.fresh + ahead, self.fresh * (self.steps - completed))
        return (self.fresh * completed if taken is None else taken) + more


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Work for a rollout worker: a sample to start or continue, by ``version`` or a newer one."""

    version: int
    trajectory: Trajectory
