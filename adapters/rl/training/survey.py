"""A pass over a whole batch before its step, for figures that depend on all of it. Collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.adapters.rl.loss.batch import TrainingBatch
from holdfast.adapters.rl.loss.ppo import target_logprobs
from holdfast.adapters.rl.loss.ratios import score_norms, sequence_ratios
from holdfast.adapters.rl.training.proximal import ProximalPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The policy's figures of a batch before its step, the same on all ranks.

    ``ratios`` and ``norms`` [rows] float64: see `sequence_ratios` and `score_norms`; ``proximal``
    and ``reference`` [rows, length - 1]: the log-probabilities under a proximal policy and under
    the reference of a penalty, None without one.
    """

    ratios: Tensor
    norms: Tensor
    proximal: Tensor | None
    reference: Tensor | None = None

    @property
    def variances(self) -> Tensor:
        """The variance that a unit of advantage of each row adds to the gradient, [rows]."""
        return self.ratios.square() * self.norms


@torch.no_grad()
def survey(
    model: nn.Module,
    batch: TrainingBatch,
    *,
    microbatches: int,
    rank: int,
    ranks: int,
    sum_: Callable[[Tensor], None],
    proximal: ProximalPolicy | None = None,
    reference: ProximalPolicy | None = None,
) -> Survey:
    """Divide the microbatches among the ranks, and combine their results.

    A microbatch gives the same bits on any rank; ``sum_`` adds a tensor up over the ranks in place,
    and every element comes from one of them. A rank that has fewer microbatches than others runs
    microbatch 0 in addition, since a forward pass of a sharded model is collective.
    """
    own = range(rank, microbatches, ranks)
    turns = 1 + (microbatches - 1) // ranks
    indices = [*own, *[0] * (turns - len(own))]
    pieces = [batch.part(index, of=microbatches) for index in indices]
    anchors = proximal.logprobs(pieces) if proximal else []
    references = reference.logprobs(pieces) if reference else []
    columns = batch.mask.shape[1]
    width = 2 + columns * (1 + bool(references))
    found = torch.zeros(len(batch.tokens), width, dtype=torch.float64)
    for turn, (index, piece) in enumerate(zip(indices, pieces, strict=True)):
        logits = model(piece.tokens)
        if turn >= len(own):
            continue
        rows = found[index * len(piece.tokens) : (index + 1) * len(piece.tokens)]
        current = target_logprobs(logits, piece.tokens)
        rows[:, 0] = sequence_ratios(current, piece.behavior, piece.mask)
        rows[:, 1] = score_norms(logits, piece.tokens, piece.mask)
        if anchors:
            rows[:, 2 : 2 + columns] = anchors[turn]
        if references:
            rows[:, 2 + columns :] = references[turn]
    sum_(found)
    return Survey(
        ratios=found[:, 0],
        norms=found[:, 1],
        proximal=found[:, 2 : 2 + columns].float() if proximal else None,
        reference=found[:, 2 + columns :].float() if reference else None,
    )
