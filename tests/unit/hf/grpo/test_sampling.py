"""The calls of TRL that are replaced while a round is sampled, and what is undone after them."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from adapter_packages import needs

pytestmark = needs("transformers", "accelerate", "safetensors")


class Trainer:
    """A trainer that samples, rewards and scores in one call, as TRL's does."""

    def __init__(self, rollout: Any = None) -> None:
        self.rollout_func = rollout
        self.state = SimpleNamespace(num_input_tokens_seen=5)
        self._metrics = {"train": defaultdict[str, list[float]](list, {"reward": [1.0]})}
        self._pending_metrics = defaultdict[str, list[float]](list)
        self._pending_extra_logs = defaultdict[str, list[Any]](list)

    def _generate_single_turn(self) -> str:
        return "sampled"

    def _calculate_rewards(self) -> str:
        return "rewards"

    def _get_per_token_logps_and_entropies(self) -> str:
        return "logps"

    def calls(self) -> list[Any]:
        return [
            self._generate_single_turn(),
            self._calculate_rewards(),
            self._get_per_token_logps_and_entropies(),
            self.rollout_func and self.rollout_func(),
        ]


@pytest.mark.parametrize("rollout", [None, lambda: "rolled"])
def test_calls_are_replaced_for_a_while(rollout: Any) -> None:
    from holdfast.adapters.hf.grpo.sampling import _in_place

    trainer = Trainer(rollout)
    before = trainer.calls()
    given = (lambda: 1, lambda: 2, lambda: 3)
    with pytest.raises(KeyError), _in_place(trainer, *given, logps=lambda: 4):
        assert trainer.calls() == [1, 3, 4, rollout and 2]
        raise KeyError
    assert trainer.calls() == before


def test_counts_and_metrics_of_a_chunk_are_undone() -> None:
    from holdfast.adapters.hf.grpo.sampling import _unseen

    trainer = Trainer()
    with _unseen(trainer):
        trainer.state.num_input_tokens_seen += 4
        trainer._metrics["train"]["reward"].append(2.0)
        trainer._metrics["train"]["entropy"].append(2.0)
        trainer._pending_metrics["own"].append(2.0)
    assert trainer.state.num_input_tokens_seen == 5
    assert trainer._metrics["train"] == {"reward": [1.0]}
    assert not trainer._pending_metrics


def test_outputs_of_parts_are_united_row_by_row() -> None:
    from holdfast.adapters.hf.grpo.sampling import _united

    parts = [{"ids": [[1], [2]], "name": "game"}, {"ids": [[3], []], "name": "game"}]
    assert _united(parts) == {"ids": [[1], [2], [3], []], "name": "game"}
