"""The prompts of rounds, in the order of TRL's own sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.adapters.hf.grpo.shape import RoundShape
from holdfast.elastic import ConfigError
from holdfast.elastic.randomness import stream_seed
from holdfast.elastic.seeding import seed_all


class Prompts:
    """The examples of each round's completions; ``made`` is the Trainer's own DataLoader.

    TRL's sampler gives the examples of a round once for every microbatch that the round serves. An
    epoch's order is drawn from a new sampler, which has gone through the epochs before.
    """

    def __init__(self, trainer: Any, made: Any, shape: RoundShape, *, seed: int) -> None:
        self._trainer, self._made, self._shape, self._seed = trainer, made, shape, seed
        self._sampler: Any = None
        self._drawn = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)
        self.microbatches = len(made.sampler) // shape.completions
        if not self.microbatches:
            raise ConfigError(
                f"train_dataset has {len(made.dataset)} prompts, and a round needs "
                f"{shape.completions // shape.group}: give more prompts, or a smaller "
                "steps_per_generation, gradient_accumulation_steps or per_device_train_batch_size"
            )

    def rows(self, epoch: int, number: int) -> list[dict[str, Any]]:
        """Return an example for each completion of a round; a dict of its own for each.

        The examples are read under a seed of their own.
        """
        order, count = self._order_of(epoch), self._shape.completions
        seed_all(stream_seed(self._seed, "prompts", epoch, number))
        dataset = self._made.dataset
        found = [dict(dataset[index]) for index in order[number * count :][:count].tolist()]
        rows: list[dict[str, Any]] = self._made.collate_fn(found)
        return rows

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        """Return the first ``completions`` numbers of each round of an epoch."""
        if self._sampler is None or epoch < self._drawn:
            self._sampler, self._drawn = self._trainer._get_train_sampler(self._made.dataset), -1
        while self._drawn < epoch:
            self._drawn += 1
            seed_all(stream_seed(self._seed, "order", self._drawn))
            whole = np.fromiter(self._sampler, np.int64)
            shape = self._shape
            rounds = whole.reshape(-1, shape.length, shape.completions)
            self._order = rounds[:, 0].reshape(-1)
        return self._order
