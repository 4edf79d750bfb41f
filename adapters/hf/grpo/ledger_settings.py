"""The arguments of a GRPOTrainer with which the rollout ledger trains each sample once, or none.

A sample belongs to one step and to the weights of its begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from holdfast.adapters.hf.grpo.shape import RoundShape
from holdfast.adapters.hf.ledger_rollouts import LedgerRollouts
from holdfast.elastic import ConfigError

_SHAPES: Final = {"top_p": (1.0,), "top_k": (0,), "min_p": (), "repetition_penalty": (1.0,)}
"""Values that leave the distribution of the model as it is, beside None."""


def check_ledger(trainer: Any, shape: RoundShape) -> None:
    """Raise ``ConfigError`` that names the first argument which the ledger's rules exclude."""
    given: LedgerRollouts = trainer.rollout_func
    for said in _refused(trainer, shape, given):
        raise ConfigError(f"ledger_rollouts: {said}")


def _refused(trainer: Any, shape: RoundShape, given: LedgerRollouts) -> Iterator[str]:
    args, held = trainer.args, trainer.holdfast
    if shape.iterations > 1:
        yield (
            f"num_iterations={shape.iterations} trains a sample {shape.iterations} times, and the "
            "ledger counts each once: set num_iterations=1, or leave ledger_rollouts out"
        )
    if shape.slices != shape.microbatches:
        yield (
            f"a round of {shape.slices} microbatches (steps_per_generation) does not serve exactly "
            f"one step of {shape.microbatches} (gradient_accumulation_steps), as the ledger's "
            "samples do: leave steps_per_generation out"
        )
    if held.snapshot_every != 1:
        yield (
            f"HoldfastArguments(snapshot_every={held.snapshot_every}): a sample is of the weights "
            "of one step, so each step needs a snapshot: leave snapshot_every out"
        )
    if len(trainer.eos_token_ids) != 1:
        yield (
            f"answers end with any of the tokens {trainer.eos_token_ids}, and the ledger knows one "
            "end: set model.generation_config.eos_token_id to one token before the trainer is made"
        )
    if given.directory is not None and held.rebuild_frozen:
        yield (
            "with HoldfastArguments(rebuild_frozen=True) the snapshots lack the frozen weights, "
            "which processes that sample read there: leave rebuild_frozen out, or the directory"
        )
    if given.sample is None:
        yield from _not_by_the_model(trainer, args)


def _not_by_the_model(trainer: Any, args: Any) -> Iterator[str]:
    """Yield the settings by which the Trainer's model cannot sample for the ledger."""
    remedy = "leave it out, or give ledger_rollouts a function that samples so"
    for name, usual in _SHAPES.items():
        value = getattr(args, name, None)
        if value is not None and value not in usual:
            yield f"{name}={value!r} is not supported where the model samples: {remedy}"
    for name in ("generation_kwargs", "cache_implementation"):
        if value := getattr(args, name, None):
            yield f"{name}={value!r} is not supported where the model samples: {remedy}"
    config = trainer.model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        yield (
            f"a {type(trainer.model).__name__} with other layers than full attention cannot sample "
            "by slots: give ledger_rollouts a function that samples from it"
        )
