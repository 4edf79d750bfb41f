"""The shape of GRPO's rounds follows from the arguments; what cannot be kept is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from adapter_packages import needs

pytestmark = needs("transformers", "accelerate", "safetensors")


def trainer_of(kind: Any = SimpleNamespace, **given: Any) -> Any:
    """Return what `settle` reads of a GRPOTrainer."""
    args = SimpleNamespace(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=2,
        generation_batch_size=8,
    )
    found = kind()
    for name, value in {
        "args": args,
        "num_generations": 2,
        "num_iterations": 1,
        "loss_type": "dapo",
        "tools": None,
        "environment_factories": None,
        "holdfast": SimpleNamespace(microbatches=0),
        **given,
    }.items():
        setattr(args if hasattr(args, name) else found, name, value)
    return found


class Trainer(SimpleNamespace):
    """A class by the name of TRL's."""


Trainer.__module__, Trainer.__qualname__ = "trl.trainer.grpo_trainer", "GRPOTrainer"


class Own(Trainer):
    """A user's subclass."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs


@pytest.mark.parametrize(
    ("given", "slices", "microbatches"),
    [
        ({}, 2, 2),
        ({"steps_per_generation": 4, "generation_batch_size": 16}, 4, 2),
        ({"holdfast": SimpleNamespace(microbatches=6)}, 6, 6),
        ({"holdfast": SimpleNamespace(microbatches=6), "steps_per_generation": 3}, 3, 6),
    ],
)
def test_a_round_serves_one_step_unless_the_arguments_say_more(
    given: dict[str, Any], slices: int, microbatches: int
) -> None:
    from holdfast.adapters.hf.grpo import settle

    trainer = trainer_of(Trainer, **given)
    shape = settle(trainer)
    assert (shape.slices, shape.microbatches) == (slices, microbatches)
    args = trainer.args
    assert (args.steps_per_generation, args.generation_batch_size) == (slices, 4 * slices)
    assert args.gradient_accumulation_steps == microbatches


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_generations": 3}, "a round of 8 completions .* num_generations=3.*multiple of 3"),
        ({"loss_type": "new"}, "loss_type='new' is not supported.*bnpo, cispo"),
        ({"tools": [print]}, r"GRPOTrainer\(tools=...\) is not supported"),
        ({"environment_factories": {"a": dict}}, r"GRPOTrainer\(environment_factory=...\)"),
        ({"_is_vlm": True}, "a processor of images is not supported.*give the tokenizer alone"),
        ({"kind": Own}, r"resilient_trainer\(Own\): it has a _prepare_inputs of its own"),
    ],
)
def test_what_no_round_can_do_is_refused(given: dict[str, Any], said: str) -> None:
    from holdfast.adapters.hf.grpo import settle
    from holdfast.elastic import ConfigError

    with pytest.raises(ConfigError, match=said):
        settle(trainer_of(**{"kind": Trainer, **given}))
