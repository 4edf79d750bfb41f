"""`ledger_rollouts`: a rollout function of TRL whose completions come from the rollout ledger.

Under `resilient_trainer` the ledger gives out the prompts of a step as tokens, keeps every sampled
token in a log, and counts each sample once. Only an evaluation calls the function as TRL does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.adapters.rl.library import Rollouts
from holdfast.adapters.rl.samples.sample import Sample
from holdfast.adapters.rl.samples.trajectory import Delta, Trajectory, TurnLimits
from holdfast.ckpt import checks
from holdfast.ckpt.types import Json
from holdfast.elastic import ConfigError

SampleAll = Callable[[Sequence[Sample], Any], object]
"""Finishes samples, given the Trainer: it draws tokens and adds them by `Sample.extend`."""

ANY_CONTEXT: Final = 1 << 30
"""Tokens of prompt and answer together: TRL limits the answer alone."""

_RULES: Final[Mapping[str, checks.Rule]] = {
    "slots": checks.count(1, remedy="give 1 or more answers"),
    "log_every_tokens": checks.count(1, remedy="give 1 or more tokens"),
}


@dataclass(kw_only=True)
class LedgerRollouts:
    """The rollout function that `ledger_rollouts` returns, with its settings."""

    sample: SampleAll | None
    slots: int
    directory: str | Path | None
    silence_s: float
    log_every_tokens: int
    fatal: bool
    live: Rollouts | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        checks.check_fields(self, _RULES, error=ConfigError)
        if self.sample is not None and not callable(self.sample):
            raise ConfigError(
                f"ledger_rollouts({self.sample!r}): give a function of samples and a Trainer that "
                "finishes the samples, or nothing, and the Trainer's model samples"
            )

    def report(self) -> dict[str, Json]:
        """Return the counts of prompts, samples and tokens, and every violation; for rank 0.

        Raises ``ConfigError`` before training.
        """
        if self.live is None:
            raise ConfigError("ledger_rollouts: nothing was sampled yet: call report after train()")
        return self.live.report()

    def finish(self, answers: Sequence[Sample], trainer: Any, *, sink: Any, context: int) -> None:
        """Have all of ``answers`` sampled; of prompt and answer ``context`` tokens are needed."""
        if self.sample is not None:
            self.sample(answers, trainer)
        elif answers:
            from holdfast.adapters.hf.model_sampling import sample_from_model

            sample_from_model(answers, trainer, sink=sink, slots=self.slots, context=context)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Answer the prompts of an evaluation, outside of the ledger.

        The version of the samples is the number of completed steps, as in training. The noise
        follows from torch's generator. Raises ``ConfigError`` in TRL's own loop.
        """
        if trainer.model.training:
            raise ConfigError(
                "ledger_rollouts draws from the ledger of Holdfast's loop, and this is TRL's own: "
                "make the trainer by resilient_trainer(GRPOTrainer)(...)"
            )
        limits, starts = limits_of(trainer), prompt_tokens(trainer, prompts)
        sink = _NoLedger(limits=limits, seed=int(torch.randint(1 << 31, ())))
        step = int(trainer.state.global_step)
        answers = [
            Sample(sink, Trajectory(ordinal=number, sample=0, prompt=start), version=step)
            for number, start in enumerate(starts)
        ]
        most = max(map(len, starts)) + limits.max_new_tokens
        self.finish(answers, trainer, sink=sink, context=most)
        return columns([answer.trajectory() for answer in answers])


def ledger_rollouts(
    sample: SampleAll | None = None,
    *,
    slots: int = 8,
    directory: str | Path | None = None,
    silence_s: float = 60.0,
    log_every_tokens: int = 1,
    fatal: bool = False,
) -> LedgerRollouts:
    """Return a ``rollout_func`` for ``resilient_trainer(GRPOTrainer)`` that draws from the ledger.

    ``sample(answers, trainer)`` is called on rank 0 with the unfinished `holdfast.rl.Sample`s of a
    step and has to finish all of them. Without it the Trainer's model samples, ``slots`` answers at
    a time, at the ``temperature`` of the arguments. With a ``directory`` other processes sample:
    they attach to it by `holdfast.rl.attach`, and a silent one counts as lost after ``silence_s``.
    A loss of the process costs the tokens since the last ``log_every_tokens``. With ``fatal`` a
    violation of the ledger's rules ends the job.

    Raises ``ConfigError`` for wrong values, and when the trainer is made, for arguments with which
    a sample would be trained more than once or under newer weights.
    """
    return LedgerRollouts(
        sample=sample,
        slots=slots,
        directory=directory,
        silence_s=silence_s,
        log_every_tokens=log_every_tokens,
        fatal=fatal,
    )


def limits_of(trainer: Any) -> TurnLimits:
    """Return the limits of an answer by the Trainer's arguments."""
    end: int = trainer.eos_token_ids[0]
    most: int = trainer.args.max_completion_length
    return TurnLimits(end=end, context=ANY_CONTEXT, max_new_tokens=most)


def prompt_tokens(trainer: Any, prompts: list[Any]) -> list[tuple[int, ...]]:
    """Return the tokens of prompts, as TRL's own sampling has them."""
    ids, images, _ = trainer._tokenize_prompts(prompts)
    if images is not None:
        raise ConfigError(
            "ledger_rollouts: the ledger keeps tokens, and a prompt has images: give prompts of "
            "text alone, or leave ledger_rollouts out"
        )
    return [tuple(each) for each in ids]


def columns(answers: Sequence[Trajectory]) -> dict[str, Any]:
    """Return answers as TRL takes them from a rollout function."""
    return {
        "prompt_ids": [list(each.prompt) for each in answers],
        "completion_ids": [list(each.tokens) for each in answers],
        "logprobs": [list(each.logprobs) for each in answers],
    }


@dataclass(frozen=True, kw_only=True)
class _NoLedger:
    """Takes the tokens of samples that nobody trains on (see `SampleSink`)."""

    limits: TurnLimits
    seed: int
    generation: int = 0
    version: int = 0

    def added(self, sample: Sample, delta: Delta) -> None:
        """Keep nothing: the sample has them."""

    def together(self) -> AbstractContextManager[None]:
        """Return a block at whose end nothing happens."""
        return nullcontext()
