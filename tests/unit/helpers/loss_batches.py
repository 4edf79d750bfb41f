"""A small training batch for tests of losses."""

from __future__ import annotations

import torch

from holdfast.adapters.rl.config import preset
from holdfast.adapters.rl.loss.advantages import group_advantages
from holdfast.adapters.rl.loss.batch import TrainingBatch, collate
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory

CONFIG = preset("tiny")


def make_batch(rows: int = 8, spare: int = 0) -> TrainingBatch:
    generator = torch.Generator().manual_seed(3)
    samples = []
    for row in range(rows):
        count = 1 + row % 5
        tokens = tuple(torch.randint(97, 123, (count,), generator=generator).tolist())
        logprobs = tuple((-torch.rand(count, generator=generator)).tolist())
        stamps = (Stamp(generation=1, version=row % 3, count=count),)
        samples.append(
            Trajectory(
                ordinal=row // 4,
                sample=row % 4,
                prompt=(97, 98, 62)[row % 2 :],
                tokens=tokens,
                logprobs=logprobs,
                stamps=stamps,
            )
        )
    rewards = torch.rand(rows, generator=generator)
    batch = collate(samples, rewards, rows=rows + spare, length=CONFIG.model.context)
    return batch.with_advantages(group_advantages(rewards, 4))
