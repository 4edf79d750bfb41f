"""Limits on the tokens sampled per step and held before they are trained. Pure.

Samples that the next step waits for are exempt from both limits, so a step always gets its groups:
when nothing else is allowed any more, exactly those samples continue, and training them frees room.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Pressure(StrEnum):
    """The limit that restricts new work to what the next step waits for; ``NONE``: no limit."""

    NONE = "none"
    BUDGET = "budget"
    MEMORY = "memory"


@dataclass(slots=True, kw_only=True)
class TokenBudget:
    """The tokens that may be sampled between one step and the next; ``limit`` None: any number.

    Samples beyond the budget are set aside, and continue once the next step has taken its groups
    (C3PO++: "Every Step Evolves", arXiv:2510.18855).
    """

    limit: int | None = None
    spent: int = 0

    def charge(self, tokens: int) -> None:
        """Charge the budget with this many newly sampled tokens."""
        self.spent += tokens

    def renew(self) -> None:
        """Reset the budget, because a step has taken its groups."""
        self.spent = 0

    @property
    def left(self) -> int | None:
        """The tokens that may still be sampled; None without a limit."""
        return None if self.limit is None else max(0, self.limit - self.spent)

    def share(self, workers: int) -> int | None:
        """Return how many tokens each worker may sample before it asks again; None: any number.

        Together the workers overrun the budget by at most one round of their slots each.
        """
        if self.left is None or not self.left:
            return None
        return -(-self.left // max(1, workers))


def pressure(budget: TokenBudget, *, held_tokens: int, most: int | None) -> Pressure:
    """Return the limit that is reached: the budget is spent, or ``held_tokens`` are too many."""
    if most is not None and held_tokens >= most:
        return Pressure.MEMORY
    return Pressure.BUDGET if budget.left == 0 else Pressure.NONE
