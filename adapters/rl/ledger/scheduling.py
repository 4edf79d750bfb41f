"""The settings of rollout scheduling. A pure value."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final, get_args

import msgspec

from holdfast.adapters.rl.ledger.claim_order import Claims
from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.ckpt import checks
from holdfast.ckpt.errors import ArgumentError

_LIMIT: Final = checks.optional(checks.count(1, remedy="give 1 or more tokens, or None"))
_RULES: Final[Mapping[str, checks.Rule]] = {
    "order": checks.one_of(*map(str, GroupOrder)),
    "claims": checks.one_of(*get_args(Claims)),
    "over_provision": checks.optional(
        checks.number(0, sys.float_info.max, remedy="give 0 or more, or None for eta")
    ),
    "token_budget": _LIMIT,
    "ledger_tokens": _LIMIT,
    "worker_tokens": _LIMIT,
    "skip_equal": checks.optional(checks.count(1, remedy="give 1 or more steps, or None")),
}


class Scheduling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for admitting prompts, giving out samples, and taking groups for steps.

    ``over_provision``: how many more prompts are admitted than the next step needs, as a share of a
    step; at most eta, and None means eta. Samples that are unfinished when a step has its groups
    are kept, and continue (APRIL, arXiv:2509.18521). ``token_budget``: tokens sampled per step;
    beyond it, samples that the next step does not wait for are set aside until then.
    ``ledger_tokens`` and ``worker_tokens``: tokens held by the ledger, or by one worker; from then
    on only samples that the next step waits for are given out. None: no limit.

    ``skip_equal``: groups whose rewards are all equal are not trained, and further prompts fill the
    step (Yu et al., "DAPO": dynamic sampling). A step that passes over as many groups as
    ``skip_equal`` steps have ends the job. None: such groups are trained as any others.
    """

    order: GroupOrder = GroupOrder.PROMPT
    claims: Claims = "prompt"
    over_provision: float | None = None
    token_budget: int | None = None
    ledger_tokens: int | None = None
    worker_tokens: int | None = None
    skip_equal: int | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self, _RULES, error=ArgumentError)

    def check(self, *, mode: str, eta: int) -> None:
        """Raise ``ArgumentError`` for what ``mode`` excludes with staleness up to ``eta``."""
        if self.over_provision is not None and self.over_provision > eta:
            raise ArgumentError(
                f"over_provision is {self.over_provision} steps, but samples may be {eta} steps "
                f"old at most in mode {mode!r}: needed at most that"
            )
        if mode != "bounded" and self.order != GroupOrder.PROMPT:
            raise ArgumentError(
                f"order {str(self.order)!r} in mode {mode!r}: in this mode the steps train the "
                "prompts in the order of their numbers; choose mode 'bounded'"
            )
        if self.skip_equal is not None and self.order != GroupOrder.PROMPT:
            raise ArgumentError(
                f"skip_equal with order {str(self.order)!r}: groups are passed over in the order "
                "of the prompts; choose order 'prompt', or None for skip_equal"
            )
        if mode != "bounded" and self.token_budget is not None:
            raise ArgumentError(
                f"token_budget in mode {mode!r}: a sample that is set aside continues under a "
                "newer policy version; choose mode 'bounded'"
            )

    def ahead(self, *, groups: int, eta: int) -> int:
        """Return how many prompts are admitted beyond those of the next step."""
        return int(groups * (eta if self.over_provision is None else self.over_provision))
