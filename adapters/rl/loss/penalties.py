"""Penalties that are subtracted from the reward of long answers. Pure."""

from __future__ import annotations

import msgspec


class LengthPenalty(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Penalties for the length of an answer, in units of the reward.

    The penalty rises linearly from 0 to ``overlong`` over the last ``overlong_tokens`` tokens that
    an answer may have (Yu et al., "DAPO": soft overlong punishment); 0 tokens: no such penalty.
    Besides, every sampled token costs ``per_token``.
    """

    overlong_tokens: int = 0
    overlong: float = 1.0
    per_token: float = 0.0

    def __post_init__(self) -> None:
        if self.overlong_tokens < 0:
            raise ValueError(f"overlong_tokens is {self.overlong_tokens}, needed: 0 or more")
        if not 0 <= self.overlong < float("inf"):
            raise ValueError(f"overlong is {self.overlong}, needed: 0 or more")
        if not 0 <= self.per_token < float("inf"):
            raise ValueError(f"per_token is {self.per_token}, needed: 0 or more")

    def of(self, tokens: int, *, most: int) -> float:
        """Return the penalty of an answer of ``tokens`` sampled tokens; ``most`` are allowed."""
        penalty = self.per_token * tokens
        if self.overlong_tokens:
            beyond = tokens - (most - self.overlong_tokens)
            penalty += self.overlong * min(1.0, max(0, beyond) / self.overlong_tokens)
        return penalty
