"""TRL's GRPOTrainer in Holdfast's loop: each microbatch samples the completions that it trains on.

TRL samples for one optimizer step or several at once, and deals the completions out. Here a
microbatch has whole groups of completions, samples them from the weights of its step under its own
seed, and computes their advantages. So nothing has to be kept between steps, and a step that is
repeated, by whichever rank, samples the same completions.

Losses that TRL divides by the tokens of the whole step are sums here. After the pass the gradient
is divided by the tokens of all ranks' microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from holdfast.adapters.hf.microbatches import MicrobatchesOfTrainer
from holdfast.adapters.hf.ranks import as_only_process
from holdfast.elastic import ConfigError

_GRPO: Final = "trl.trainer.grpo_trainer.GRPOTrainer"
_BY_TOKENS: Final = frozenset({"cispo", "dapo", "vespo"})
"""Losses that are divided by ``num_items_in_batch``, the tokens of the step."""

_BY_MEANS: Final = frozenset({"bnpo", "dr_grpo", "grpo", "luspo", "sapo"})
_ITEMS: Final = "num_items_in_batch"


def is_grpo(trainer: Any) -> bool:
    """True for a GRPOTrainer or a subclass of it."""
    names = (f"{each.__module__}.{each.__qualname__}" for each in type(trainer).__mro__)
    return _GRPO in names


def sample_by_microbatch(trainer: Any) -> None:
    """Have each microbatch sample its own completions. Raises ``ConfigError`` where it cannot."""
    args, groups = trainer.args, trainer.num_generations
    size, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if size % groups:
        raise ConfigError(
            f"per_device_train_batch_size={size} is no multiple of num_generations={groups}: each "
            f"microbatch must have whole groups; give a multiple, such as {groups}, and fewer "
            "gradient_accumulation_steps"
        )
    if args.steps_per_generation != steps:
        raise ConfigError(
            f"steps_per_generation={args.steps_per_generation} differs from "
            f"gradient_accumulation_steps={steps}, so completions would serve several steps, which "
            "is not supported yet with resilient_trainer: leave steps_per_generation and "
            "generation_batch_size out"
        )
    if trainer.loss_type not in _BY_TOKENS | _BY_MEANS:
        raise ConfigError(
            f"loss_type={trainer.loss_type!r} is not supported with resilient_trainer yet: give "
            f"one of {', '.join(sorted(_BY_TOKENS | _BY_MEANS))}"
        )
    for name in ("tools", "environment_factories"):
        if getattr(trainer, name, None):
            raise ConfigError(
                f"GRPOTrainer({name.replace('_factories', '_factory')}=...) is not supported yet "
                "with resilient_trainer: leave it out, or use environments of several turns "
                "(docs/how-to/reinforcement-learning.md)"
            )
    args.steps_per_generation, args.generation_batch_size = 1, size


class MicrobatchesOfGrpo(MicrobatchesOfTrainer):
    """Passes in which each microbatch samples, scores and trains on its completions."""

    def run_pass(self) -> float:
        """Make the mean gradient of the step; return its loss."""
        self._tokens = list[float]()
        loss = super().run_pass()
        trainer = self._trainer
        if trainer.loss_type not in _BY_TOKENS:
            return loss
        tokens = self._run.reduce(self._tokens, "sum")
        made = self._run.reduce([1.0] * len(self._tokens), "sum")
        factor = made * self._unit / max(tokens, 1.0)
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return loss * factor

    def _seen_tokens(self) -> int:
        return int(self._trainer.state.num_input_tokens_seen)

    @property
    def _unit(self) -> float:
        """The number by which a microbatch divides its sum, so that it stays a small number."""
        args = self._trainer.args
        return float(args.per_device_train_batch_size * args.max_completion_length)

    def _train(self, inputs: Any) -> torch.Tensor:
        with as_only_process(self._trainer), self._counted():
            return super()._train(inputs)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the tokens of a microbatch, and have its loss divided by a constant."""
        trainer, prepare = self._trainer, self._trainer._prepare_inputs

        def prepared(inputs: Any) -> Any:
            output = prepare(inputs)
            self._tokens.append(float(output[_ITEMS]))
            return output | {_ITEMS: torch.full_like(output[_ITEMS], self._unit)}

        trainer._prepare_inputs = prepared
        try:
            yield
        finally:
            del trainer._prepare_inputs
