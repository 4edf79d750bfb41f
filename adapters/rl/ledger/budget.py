"""How much may be sampled and held before training has to catch up. Pure.

Of both limits, what the next step waits for is exempt, so a step always gets its groups: where
nothing else is allowed any more, exactly that goes on, and training it makes room.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Pressure(StrEnum):
    """Why only what the next step waits for is given out; ``NONE``: everything is."""

    NONE = "none"
    BUDGET = "budget"
    MEMORY = "memory"


@dataclass(slots=True, kw_only=True)
class TokenBudget:
    """The tokens that may be sampled between one step and the next; ``limit`` None: any number.

    What is beyond it is set aside, and goes on when the next step has taken its groups (C3PO++:
    "Every Step Evolves", arXiv:2510.18855).
    """

    limit: int | None = None
    spent: int = 0

    def charge(self, tokens: int) -> None:
        """Take in that so many more tokens were sampled."""
        self.spent += tokens

    def renew(self) -> None:
        """Begin anew: a step has taken its groups."""
        self.spent = 0

    @property
    def left(self) -> int | None:
        """Tokens that may still be sampled, None where there is no limit."""
        return None if self.limit is None else max(0, self.limit - self.spent)

    def share(self, workers: int) -> int | None:
        """Return what each of so many workers may sample before it asks again; None: any number.

        They overrun the budget together by no more than one round of their slots each.
        """
        if self.left is None or not self.left:
            return None
        return -(-self.left // max(1, workers))


def pressure(budget: TokenBudget, *, held: int, most: int | None) -> Pressure:
    """Return what holds work back: the budget is spent, or the ``held`` tokens are too many."""
    if most is not None and held >= most:
        return Pressure.MEMORY
    return Pressure.BUDGET if budget.left == 0 else Pressure.NONE
