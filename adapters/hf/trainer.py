"""A Trainer with Holdfast's loop in place of its own."""

from __future__ import annotations

import functools
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from holdfast.adapters.hf.accepted import check_arguments
from holdfast.adapters.hf.arguments import HoldfastArguments
from holdfast.adapters.hf.generation import GenerationOfTrainer, Journey
from holdfast.adapters.hf.grpo import is_grpo, settle
from holdfast.adapters.hf.kept import FirstState
from holdfast.adapters.hf.ranks import NOT_THE_LEADER, as_only_process, check_alone, stand_at
from holdfast.elastic import ConfigError, Run, resilient


class ResilientTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose `train` survives the loss of ranks; `resilient_trainer` mixes it in.

    ``holdfast``: the settings beside those of the training arguments.
    """

    def __init__(
        self, *args: Any, holdfast: HoldfastArguments | None = None, **kwargs: Any
    ) -> None:
        given = HoldfastArguments() if holdfast is None else holdfast
        if not isinstance(given, HoldfastArguments):
            raise ConfigError(f"holdfast={given!r}: give holdfast=HoldfastArguments(...)")
        super().__init__(*args, **kwargs)
        self.holdfast = given
        check_arguments(self.args, type(self))
        check_alone(self)
        self.holdfast_rounds = settle(self) if is_grpo(self) else None
        self._hands_on_logs = self.callback_handler.on_log
        self.callback_handler.on_log = self._on_log
        self._generation: GenerationOfTrainer | None = None

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train in Holdfast's loop; replaces the Trainer's own."""
        if trial is not None:
            raise ConfigError("resilient_trainer: hyperparameter_search is not supported yet")
        start, journey = time.time(), Journey(resume_from=resume_from_checkpoint)
        journey.first = FirstState(self)
        settings = self.holdfast.settings(
            accumulation=self.args.gradient_accumulation_steps,
            size=self.args.per_device_train_batch_size,
            seed=self.args.seed,
        )

        @resilient(**settings)
        def train(run: Run) -> dict[str, Any]:
            self._generation = GenerationOfTrainer(self, run, journey, ignore_keys_for_eval)
            try:
                return self._generation.train()
            finally:
                self._generation.leave()
                self._generation = None

        return self._finish(train(), journey, start)

    def _finish(self, outcome: dict[str, Any], journey: Journey, start: float) -> TrainOutput:
        """Do the end of the Trainer's own loop: the summary, the best model, the last callbacks."""
        if not journey.took_part:  # the others completed the run before this process began
            stand_at(self, NOT_THE_LEADER)
            self.is_in_train = False
            return TrainOutput(outcome["global_step"], outcome["train_loss"], {})
        found: TrainOutput = self._finalize_training(None, journey.samples, start)
        return found

    def _on_log(self, args: Any, state: Any, control: Any, logs: Any, **more: Any) -> Any:
        """Keep logs until their step is protected; rank 0 alone logs what belongs to no step."""
        control.should_log = False
        if self._generation is not None and self._generation.keeps(logs):
            return control
        if self.is_world_process_zero():
            return self._hands_on_logs(args, state, control, logs, **more)
        return control

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate on every rank alike; long work is no hang."""
        if self._generation is None:
            return super().evaluate(*args, **kwargs)  # type: ignore[no-any-return]
        with self._generation.run.pause(), torch.random.fork_rng([]):
            torch.manual_seed(self.args.seed + self.state.global_step)  # alike on every rank
            return super().evaluate(*args, **kwargs)  # type: ignore[no-any-return]

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Leave an evaluation as soon as the ranks change."""
        if self._generation is not None:
            self._generation.run.check()
        with as_only_process(self) if is_grpo(self) else nullcontext():
            return super().prediction_step(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let rank 0 write the directory ``checkpoint-N``."""
        if self._generation is None:
            super()._save_checkpoint(model, trial)
            return
        with self._generation.run.pause():
            if self.is_world_process_zero():
                super()._save_checkpoint(model, trial)
                name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                self._generation.save_beside(Path(self._get_output_dir(trial=trial), name))
            elif self.state.best_global_step:
                name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
                self.state.best_model_checkpoint = str(Path(self.args.output_dir, name))


@functools.cache
def made_resilient(kind: type) -> Any:
    """Return the subclass of ``kind`` and `ResilientTrainer`, the same one each time."""
    if kind is Trainer:
        return ResilientTrainer
    name = f"Resilient{kind.__name__}"
    made = type(name, (ResilientTrainer, kind), {"__module__": __name__})
    globals()[name] = made  # datasets pickles what its functions refer to, classes by name
    return made
