"""A frozen policy as environments ask it: how likely it finds a text."""

from __future__ import annotations

import torch

from holdfast.adapters.rl.loss.ppo import target_logprobs
from holdfast.adapters.rl.policy.policy import Policy
from holdfast.adapters.rl.samples.tokens import Tokenizer
from holdfast.elastic.errors import JobFailedError


class PolicyJudge:
    """The frozen policy ``name``; several threads may ask it at once.

    Its answer depends on its arguments and weights alone, bit for bit.
    """

    def __init__(self, name: str, policy: Policy, *, tokenizer: Tokenizer, context: int) -> None:
        self.name = name
        self._policy, self._tokenizer, self._context = policy.eval(), tokenizer, context

    @torch.no_grad()
    def logprobs(self, text: str, answer: str, *, ended: bool = False) -> list[float]:
        """Return the log-probability of each token of ``answer`` behind ``text``.

        With ``ended`` the end token counts as the last one of the answer. Raises ``JobFailedError``
        for an empty text, and for more tokens than the context has.
        """
        before, after = map(self._tokenizer.encode, (text, answer))
        tokens = (*before, *after, *((self._tokenizer.end,) if ended else ()))
        if not before or len(tokens) > self._context:
            raise JobFailedError(
                f"policy {self.name} was asked for {len(tokens)} tokens behind a text of "
                f"{len(before)}: give it a text, and at most {self._context} tokens in all"
            )
        row = torch.tensor([tokens])
        found: list[float] = target_logprobs(self._policy(row), row)[0, len(before) - 1 :].tolist()
        return found
