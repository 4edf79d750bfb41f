"""The prompts of a round, out of those that TRL's sampler gives for all of its microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_packages import needs

pytestmark = needs("transformers", "accelerate", "safetensors")


class Sampler:
    """Yields like TRL's: each round's prompts, twice each, for four microbatches."""

    def __init__(self, count: int) -> None:
        self._count, self._generator = count, torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return self._count // 4 * 4 * 8

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self._count, generator=self._generator).tolist()
        for at in range(0, self._count // 4 * 4, 4):
            for _ in range(4):
                for index in order[at : at + 4]:
                    yield from (index, index)


def prompts_of(count: int) -> Any:
    from holdfast.adapters.hf.grpo.prompts import Prompts
    from holdfast.adapters.hf.grpo.shape import RoundShape

    shape = RoundShape(rows=4, group=2, slices=2, iterations=2, microbatches=2)
    rows = [{"prompt": str(number)} for number in range(count)]
    made = SimpleNamespace(dataset=rows, sampler=Sampler(count), collate_fn=list)
    trainer = SimpleNamespace(_get_train_sampler=lambda _: Sampler(count))
    return Prompts(trainer, made, shape, seed=3)


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [int(row["prompt"]) for row in rows]


def test_each_round_has_its_prompts_in_the_order_of_the_sampler() -> None:
    prompts, sampler = prompts_of(10), Sampler(10)
    assert prompts.microbatches == 8
    for epoch in range(2):
        order = list(sampler)
        assert numbers(prompts.rows(epoch, 0)) == order[:8]
        assert numbers(prompts.rows(epoch, 1)) == order[32:40]


def test_an_epoch_is_the_same_after_a_later_one_and_in_another_process() -> None:
    prompts = prompts_of(10)
    first, later = prompts.rows(0, 1), prompts.rows(2, 0)
    assert prompts.rows(0, 1) == first
    assert prompts_of(10).rows(2, 0) == later


def test_each_completion_has_an_example_of_its_own() -> None:
    one, two, *_ = prompts_of(10).rows(0, 0)
    one["bonus"] = 1
    assert "bonus" not in two


def test_a_data_set_without_prompts_for_one_round_is_refused() -> None:
    from holdfast.elastic import ConfigError

    with pytest.raises(ConfigError, match="train_dataset has 3 prompts, and a round needs 4"):
        prompts_of(3)
