"""The rollout function itself: its settings, and the answers of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.adapters.hf import ledger_rollouts
from holdfast.elastic import ConfigError
from holdfast.rl import Sample


def trainer_of(*, training: bool = False, images: Any = None) -> Any:
    """Return what the function reads of a GRPOTrainer."""
    return SimpleNamespace(
        model=SimpleNamespace(training=training),
        eos_token_ids=[1],
        state=SimpleNamespace(global_step=4),
        args=SimpleNamespace(max_completion_length=3),
        _tokenize_prompts=lambda prompts: ([[len(each)] for each in prompts], images, {}),
    )


def noisy(answers: Sequence[Sample], trainer: Any) -> None:
    """Answer by the noise alone."""
    for answer in answers:
        assert answer.version == trainer.state.global_step
        while not answer.finished:
            answer.extend([2 + int(answer.noise() * 1000)], [-1.0])


def test_an_evaluation_is_answered_outside_of_the_ledger() -> None:
    rollout = ledger_rollouts(noisy)
    torch.manual_seed(5)
    found = rollout(["a", "bcd"], trainer_of())
    assert found["prompt_ids"] == [[1], [3]]
    assert [len(each) for each in found["completion_ids"]] == [3, 3]
    assert found["completion_ids"][0] != found["completion_ids"][1]
    assert found["logprobs"] == [[-1.0] * 3] * 2
    torch.manual_seed(5)
    assert rollout(["a", "bcd"], trainer_of()) == found
    assert rollout(["a", "bcd"], trainer_of()) != found


def test_training_in_a_loop_without_a_ledger_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"make the trainer by resilient_trainer\(GRPOTrainer\)"):
        ledger_rollouts(noisy)(["a"], trainer_of(training=True))


def test_prompts_with_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="a prompt has images: give prompts of text"):
        ledger_rollouts(noisy)(["a"], trainer_of(images=[object()]))


def test_nothing_is_reported_before_training() -> None:
    with pytest.raises(ConfigError, match=r"call report after train\(\)"):
        ledger_rollouts().report()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slots": 0}, "slots=0.*give 1 or more answers"),
        ({"log_every_tokens": "x"}, "log_every_tokens='x'.*give 1 or more tokens"),
        ({"sample": 3}, r"ledger_rollouts\(3\): give a function"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ledger_rollouts(**given)
