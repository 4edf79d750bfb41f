"""The ledger counts a sample once; arguments with which it could not are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from adapter_packages import needs

pytestmark = needs("transformers", "accelerate", "safetensors")


def refused(*, iterations: int = 1, slices: int = 2, rollouts: Any = None, **given: Any) -> None:
    """Check a trainer with these settings."""
    from holdfast.adapters.hf import ledger_rollouts
    from holdfast.adapters.hf.grpo.ledger_settings import check_ledger
    from holdfast.adapters.hf.grpo.shape import RoundShape

    config = SimpleNamespace(**given.pop("config", {}))
    config.get_text_config = lambda: config
    held = {"snapshot_every": 1, "rebuild_frozen": False, **given.pop("held", {})}
    trainer = SimpleNamespace(
        args=SimpleNamespace(**{"top_p": 1.0, "top_k": 0, **given.pop("args", {})}),
        holdfast=SimpleNamespace(**held),
        model=SimpleNamespace(config=config),
        rollout_func=ledger_rollouts() if rollouts is None else rollouts,
        **{"eos_token_ids": [1], **given},
    )
    shape = RoundShape(rows=4, group=2, slices=slices, iterations=iterations, microbatches=2)
    check_ledger(trainer, shape)


def test_a_round_of_one_step_is_accepted() -> None:
    refused()
    refused(config={"layer_types": ["full_attention"], "sliding_window": None})


def test_a_function_of_its_own_samples_as_it_likes() -> None:
    from holdfast.adapters.hf import ledger_rollouts

    settings = {"top_p": 0.5, "generation_kwargs": {"do_sample": False}}
    refused(rollouts=ledger_rollouts(lambda *_: None), args=settings)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"iterations": 2}, "num_iterations=2 trains a sample 2 times.*set num_iterations=1"),
        ({"slices": 4}, "a round of 4 microbatches.*leave steps_per_generation out"),
        ({"held": {"snapshot_every": 3}}, r"snapshot_every=3\): .*leave snapshot_every out"),
        ({"eos_token_ids": [1, 2]}, r"the tokens \[1, 2\].*generation_config.eos_token_id"),
        ({"args": {"top_k": 3}}, "top_k=3 is not supported.*a function that samples so"),
        ({"args": {"min_p": 0.1}}, "min_p=0.1 is not supported"),
        ({"args": {"generation_kwargs": {"num_beams": 2}}}, "generation_kwargs={'num_beams': 2}"),
        ({"config": {"sliding_window": 64}}, "other layers than full attention"),
        ({"config": {"layer_types": ["linear_attention"]}}, "other layers than full attention"),
    ],
)
def test_what_would_be_counted_twice_or_sampled_otherwise_is_refused(
    given: dict[str, Any], said: str
) -> None:
    from holdfast.elastic import ConfigError

    with pytest.raises(ConfigError, match=f"ledger_rollouts: .*{said}"):
        refused(**given)


def test_frozen_weights_that_are_built_again_cannot_be_pulled() -> None:
    from holdfast.adapters.hf import ledger_rollouts
    from holdfast.elastic import ConfigError

    with pytest.raises(ConfigError, match="leave rebuild_frozen out, or the directory"):
        refused(rollouts=ledger_rollouts(directory="here"), held={"rebuild_frozen": True})
