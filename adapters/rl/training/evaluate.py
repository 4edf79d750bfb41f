"""Held-out exact match, without sampling: one teacher-forced pass over the right answers.

A greedy answer is right exactly when every token of the right answer is the most likely one
after the tokens before it; a sampled answer is right with the product of their probabilities.
So one forward pass gives both, with no sampling noise. It is done in parts of one shape, so that
the outcome does not depend on how many ranks share the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.adapters.rl.environments.task import Problem
from holdfast.adapters.rl.loss.ppo import target_logprobs
from holdfast.adapters.rl.samples.tokens import Tokenizer

_PART_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutProblems:
    """Problems as padded tensors: tokens [rows, length], answer mask [rows, length - 1]."""

    tokens: Tensor
    mask: Tensor

    @classmethod
    def of(
        cls, problems: Sequence[Problem], *, tokenizer: Tokenizer, length: int
    ) -> HeldOutProblems:
        """Lay out problems with their right answers."""
        tokens = torch.zeros(len(problems), length, dtype=torch.long)
        mask = torch.zeros(len(problems), length - 1, dtype=torch.bool)
        for row, problem in enumerate(problems):
            prompt, answer = map(tokenizer.encode, (problem.prompt, problem.answer))
            text = (*prompt, *answer, tokenizer.end)
            tokens[row, : len(text)] = torch.tensor(text)
            mask[row, len(prompt) - 1 : len(text) - 1] = True
        return cls(tokens=tokens, mask=mask)

    def parts(self) -> list[HeldOutProblems]:
        """Return the problems in parts of a fixed size, the unit of work of an evaluation."""
        tokens, masks = torch.split(self.tokens, _PART_ROWS), torch.split(self.mask, _PART_ROWS)
        return [HeldOutProblems(tokens=t, mask=m) for t, m in zip(tokens, masks, strict=True)]


@torch.no_grad()
def exact_matches(model: nn.Module, problems: HeldOutProblems) -> Tensor:
    """Return [expected number of right sampled answers, right greedy answers], float64 [2]."""
    logits = model(problems.tokens)
    greedy = logits[:, :-1].argmax(-1) == problems.tokens[:, 1:]
    right = (greedy | ~problems.mask).all(1).double().sum()
    logprobs = target_logprobs(logits, problems.tokens).double()
    expected = (logprobs * problems.mask).sum(1).exp().sum()
    return torch.stack([expected, right])
