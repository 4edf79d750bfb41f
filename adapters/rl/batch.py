"""A training batch: trajectories as padded tensors, and its one-tensor form for a broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.rl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """``rows`` sequences padded to ``length`` tokens; targets are the tokens shifted by one.

    tokens [rows, length] int64; behavior and mask [rows, length - 1] float32, the mask 1 where
    the target is a sampled token; advantages and rewards [rows] float32; oldest [rows] int64 the
    oldest policy version that sampled a token of the row.
    """

    tokens: Tensor
    behavior: Tensor
    mask: Tensor
    advantages: Tensor
    rewards: Tensor
    oldest: Tensor

    @property
    def used(self) -> Tensor:
        """Which rows hold a trajectory, bool [rows]."""
        return self.mask.any(1)

    @property
    def token_count(self) -> int:
        """Number of sampled tokens in the batch."""
        return int(self.mask.sum())

    def part(self, index: int, *, of: int) -> Batch:
        """Return microbatch ``index`` of ``of`` equal ones."""
        rows = self.tokens.shape[0] // of
        cut = slice(index * rows, (index + 1) * rows)
        return Batch(
            tokens=self.tokens[cut],
            behavior=self.behavior[cut],
            mask=self.mask[cut],
            advantages=self.advantages[cut],
            rewards=self.rewards[cut],
            oldest=self.oldest[cut],
        )

    def trimmed(self) -> Batch:
        """Return the batch without the columns in which no row has a sampled token any more."""
        sampled = self.mask.sum(0).nonzero()
        used = int(sampled.max()) + 2 if len(sampled) else 2
        return Batch(
            tokens=self.tokens[:, :used],
            behavior=self.behavior[:, : used - 1],
            mask=self.mask[:, : used - 1],
            advantages=self.advantages,
            rewards=self.rewards,
            oldest=self.oldest,
        )

    def pack(self) -> Tensor:
        """Return everything in one float64 tensor [rows, 3 * length + 1]; exact for all of it."""
        columns = [
            self.tokens.double(),
            self.behavior.double(),
            self.mask.double(),
            self.advantages.double()[:, None],
            self.rewards.double()[:, None],
            self.oldest.double()[:, None],
        ]
        return torch.cat(columns, 1)

    @classmethod
    def unpack(cls, packed: Tensor) -> Batch:
        """Undo ``pack``."""
        length = packed.shape[1] // 3
        sizes = [length, length - 1, length - 1, 1, 1, 1]
        tokens, behavior, mask, advantages, rewards, oldest = torch.split(packed, sizes, 1)
        return cls(
            tokens=tokens.long(),
            behavior=behavior.float(),
            mask=mask.float(),
            advantages=advantages[:, 0].float(),
            rewards=rewards[:, 0].float(),
            oldest=oldest[:, 0].long(),
        )


def packed_shape(rows: int, length: int) -> tuple[int, int]:
    """Return the shape of ``Batch.pack`` for a batch of this size."""
    return rows, 3 * length + 1


def collate(
    trajectories: Sequence[Trajectory],
    rewards: Tensor,
    advantages: Tensor,
    *,
    rows: int,
    length: int,
) -> Batch:
    """Pad trajectories to ``length`` tokens and ``rows`` rows, aligning their log-probabilities.

    Rows beyond the trajectories (of dropped prompts) have an empty mask.
    """
    spare = rows - len(trajectories)
    rewards = torch.cat([rewards, torch.zeros(spare)])
    advantages = torch.cat([advantages, torch.zeros(spare)])
    tokens = torch.zeros(rows, length, dtype=torch.long)
    behavior = torch.zeros(rows, length - 1)
    mask = torch.zeros(rows, length - 1)
    oldest = torch.zeros(rows, dtype=torch.long)
    for row, trajectory in enumerate(trajectories):
        text = trajectory.prompt + trajectory.tokens
        start, end = len(trajectory.prompt) - 1, len(text) - 1
        tokens[row, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        behavior[row, start:end] = torch.tensor(trajectory.logprobs)
        mask[row, start:end] = 1.0
        oldest[row] = min(trajectory.versions)
    return Batch(
        tokens=tokens,
        behavior=behavior,
        mask=mask,
        advantages=advantages,
        rewards=rewards,
        oldest=oldest,
    )
