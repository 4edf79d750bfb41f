"""The settings of a GRPOTrainer: the shape of its rounds; what cannot be kept is refused."""

from __future__ import annotations

from typing import Any, Final

from holdfast.adapters.hf.grpo.ledger_settings import check_ledger
from holdfast.adapters.hf.grpo.shape import RoundShape
from holdfast.adapters.hf.ledger_rollouts import LedgerRollouts
from holdfast.elastic import ConfigError

_GRPO: Final = "trl.trainer.grpo_trainer.GRPOTrainer"
_LOSSES: Final = frozenset({"bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo"})
"""Losses that are sums over microbatches, divided by numbers that all microbatches share."""

_OWN: Final = ("_generate_single_turn", "_get_per_token_logps_and_entropies", "_prepare_inputs")
"""Methods that are called for parts of a round, or for all of it, where TRL calls them once."""


def is_grpo(trainer: Any) -> bool:
    """True for a GRPOTrainer or a subclass of it."""
    return _GRPO in _names(trainer)


def settle(trainer: Any) -> RoundShape:
    """Return the shape of the rounds; the arguments are then those of one process.

    A step has ``holdfast.microbatches`` microbatches, if that is set. Raises ``ConfigError`` for
    what is not supported.
    """
    args = trainer.args
    given: int = args.gradient_accumulation_steps
    microbatches: int = trainer.holdfast.microbatches or given
    slices: int = args.steps_per_generation
    if slices == given:  # as it is where nobody sets it: one round for a step
        slices = microbatches
    _check(trainer)
    shape = RoundShape(
        rows=args.per_device_train_batch_size,
        group=trainer.num_generations,
        slices=slices,
        iterations=trainer.num_iterations,
        microbatches=microbatches,
    )
    if shape.completions % shape.group:
        raise ConfigError(
            f"a round of {shape.completions} completions (per_device_train_batch_size={shape.rows} "
            f"x {slices} microbatches) does not divide into groups of "
            f"num_generations={shape.group}: give a per_device_train_batch_size that is a multiple "
            f"of {shape.group}"
        )
    args.gradient_accumulation_steps = microbatches
    args.steps_per_generation, args.generation_batch_size = slices, shape.completions
    if isinstance(getattr(trainer, "rollout_func", None), LedgerRollouts):
        check_ledger(trainer, shape)
    return shape


def _check(trainer: Any) -> None:
    if trainer.loss_type not in _LOSSES:
        raise ConfigError(
            f"loss_type={trainer.loss_type!r} is not supported with resilient_trainer yet: give "
            f"one of {', '.join(sorted(_LOSSES))}"
        )
    if getattr(trainer, "_is_vlm", False):
        raise ConfigError(
            "GRPOTrainer(processing_class=...): a processor of images is not supported yet with "
            "resilient_trainer: give the tokenizer alone, and prompts without images"
        )
    for name in ("tools", "environment_factories"):
        if getattr(trainer, name, None):
            raise ConfigError(
                f"GRPOTrainer({name.replace('_factories', '_factory')}=...) is not supported yet "
                "with resilient_trainer: leave it out, or use environments of several turns "
                "(docs/how-to/reinforcement-learning.md)"
            )
    for kind in type(trainer).__mro__[: _names(trainer).index(_GRPO)]:
        if changed := sorted(set(_OWN) & set(vars(kind))):
            raise ConfigError(
                f"resilient_trainer({kind.__name__}): it has a {changed[0]} of its own, which "
                "Holdfast calls for parts of a round: move the change to rollout_func, to a "
                "reward function or to compute_loss"
            )


def _names(trainer: Any) -> list[str]:
    return [f"{each.__module__}.{each.__qualname__}" for each in type(trainer).__mro__]
