"""A training batch: trajectories as padded tensors, and its one-tensor form for a broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.adapters.rl.samples.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """``rows`` sequences padded to ``length`` tokens; targets are the tokens shifted by one.

    tokens [rows, length] int64; behavior and mask [rows, length - 1] float32, the mask 1 where
    the target is a sampled token; versions [rows, length - 1] int64, the policy version that
    sampled it; rewards and advantages [rows] float32, the latter 0 until `with_advantages`; used
    [rows] bool, the rows that hold a trajectory, which come first. In a job of several policies a
    batch is for one of them: the tokens of others are context, as observed ones are.
    """

    tokens: Tensor
    behavior: Tensor
    mask: Tensor
    versions: Tensor
    rewards: Tensor
    advantages: Tensor
    used: Tensor

    @property
    def spoken(self) -> Tensor:
        """The rows with a sampled token, bool [rows]."""
        return self.mask.any(1)

    @property
    def token_count(self) -> int:
        """Number of sampled tokens in the batch."""
        return int(self.mask.sum())

    @property
    def sampled_by(self) -> list[int]:
        """The policy versions that sampled the batch's tokens, the oldest first."""
        return sorted(set(self.versions[self.mask > 0].tolist()))

    def with_advantages(self, advantages: Tensor) -> TrainingBatch:
        """Return the batch with these advantages, for the rows that hold a trajectory."""
        spare = len(self.rewards) - len(advantages)
        return replace(self, advantages=torch.cat([advantages, torch.zeros(spare)]))

    def part(self, index: int, *, of: int) -> TrainingBatch:
        """Return microbatch ``index`` of ``of`` equal ones."""
        rows = self.tokens.shape[0] // of
        cut = slice(index * rows, (index + 1) * rows)
        return TrainingBatch(
            tokens=self.tokens[cut],
            behavior=self.behavior[cut],
            mask=self.mask[cut],
            versions=self.versions[cut],
            rewards=self.rewards[cut],
            advantages=self.advantages[cut],
            used=self.used[cut],
        )

    def trimmed(self) -> TrainingBatch:
        """Return the batch without the trailing columns in which no row has a sampled token."""
        sampled = self.mask.sum(0).nonzero()
        used = int(sampled.max()) + 2 if len(sampled) else 2
        return TrainingBatch(
            tokens=self.tokens[:, :used],
            behavior=self.behavior[:, : used - 1],
            mask=self.mask[:, : used - 1],
            versions=self.versions[:, : used - 1],
            rewards=self.rewards,
            advantages=self.advantages,
            used=self.used,
        )

    def pack(self) -> Tensor:
        """Return all but the advantages in one float64 tensor (`packed_shape`), exact."""
        columns = [
            self.tokens.double(),
            self.behavior.double(),
            self.mask.double(),
            self.versions.double(),
            self.rewards.double()[:, None],
            self.used.double()[:, None],
        ]
        return torch.cat(columns, 1)

    @classmethod
    def unpack(cls, packed: Tensor) -> TrainingBatch:
        """Undo ``pack``."""
        length = (packed.shape[1] + 1) // 4
        sizes = [length, length - 1, length - 1, length - 1, 1, 1]
        tokens, behavior, mask, versions, rewards, used = torch.split(packed, sizes, 1)
        return cls(
            tokens=tokens.long(),
            behavior=behavior.float(),
            mask=mask.float(),
            versions=versions.long(),
            rewards=rewards[:, 0].float(),
            advantages=torch.zeros(len(packed)),
            used=used[:, 0].bool(),
        )


def packed_shape(rows: int, length: int) -> tuple[int, int]:
    """Return the shape of ``TrainingBatch.pack`` for a batch of this size."""
    return rows, 4 * length - 1


def collate(
    trajectories: Sequence[Trajectory],
    rewards: Tensor,
    *,
    rows: int,
    length: int,
    speaker: int = 0,
) -> TrainingBatch:
    """Pad trajectories to ``length`` tokens and ``rows`` rows, aligning the values of their tokens.

    Observed tokens and those of other policies than number ``speaker`` are context: their mask is
    0. Rows beyond the trajectories (of dropped prompts) have an empty mask.
    """
    tokens = torch.zeros(rows, length, dtype=torch.long)
    behavior = torch.zeros(rows, length - 1)
    mask = torch.zeros(rows, length - 1)
    versions = torch.zeros(rows, length - 1, dtype=torch.long)
    for row, trajectory in enumerate(trajectories):
        text = trajectory.prompt + trajectory.tokens
        tokens[row, : len(text)] = torch.tensor(text)
        before = len(trajectory.prompt) - 1
        spoken = zip(trajectory.spans, trajectory.speakers, strict=True)
        at = [(before + i, who == speaker) for (a, b), who in spoken for i in range(a, b)]
        where = [column for column, _ in at]
        behavior[row, where] = torch.tensor(trajectory.logprobs)
        mask[row, where] = torch.tensor([float(is_own) for _, is_own in at])
        versions[row, where] = torch.tensor(trajectory.token_versions)
    return TrainingBatch(
        tokens=tokens,
        behavior=behavior,
        mask=mask,
        versions=versions,
        rewards=torch.cat([rewards, torch.zeros(rows - len(trajectories))]),
        advantages=torch.zeros(rows),
        used=torch.arange(rows) < len(trajectories),
    )
