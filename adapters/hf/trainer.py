"""A Trainer with Holdfast's loop in place of its own."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from holdfast.adapters.hf.accepted import check_arguments
from holdfast.adapters.hf.arguments import HoldfastArguments
from holdfast.adapters.hf.evaluation import (
    DividedEvaluation,
    PlaceOfBatch,
    divides,
    seed_of,
    seeded,
)
from holdfast.adapters.hf.generation import GenerationOfTrainer, Journey
from holdfast.adapters.hf.grpo import is_grpo, settle
from holdfast.adapters.hf.kept import FirstState
from holdfast.adapters.hf.ranks import NOT_THE_LEADER, as_only_process, check_alone, stand_at
from holdfast.adapters.hf.sharded import unannounced
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
        found = [each for each in (*args, *kwargs.values()) if isinstance(each, TrainingArguments)]
        for each in found:
            check_arguments(each, type(self))
        with unannounced(found):
            super().__init__(*args, **kwargs)
        self.holdfast = given
        check_arguments(self.args, type(self))
        check_alone(self)
        self.holdfast_rounds = settle(self) if is_grpo(self) else None
        self._hands_on_logs = self.callback_handler.on_log
        self.callback_handler.on_log = self._on_log
        self._generation: GenerationOfTrainer | None = None
        self._evaluation: DividedEvaluation | None = None

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
        journey.first = FirstState(self, is_cut=bool(self.args.fsdp))
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

        trained = False
        try:
            outcome, trained = train(), True
        finally:
            journey.release(trained=trained)
        return self._finish(outcome, journey, start)

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
        """Evaluate on all ranks together; long work is no hang."""
        with self._evaluating():
            return super().evaluate(*args, **kwargs)  # type: ignore[no-any-return]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict on all ranks together, like `evaluate`."""
        with self._evaluating():
            return super().predict(*args, **kwargs)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        if self._generation is None:
            yield
            return
        self.__dict__.pop("_eval_dataloaders", None)  # their samplers may go on where they were
        run, gathered = self._generation.run, self._generation.gathered
        with run.pause(), seeded(seed_of(self)), gathered():
            yield

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Divide the batches among the ranks, if they can be divided."""
        if self._generation is None or not divides(self, dataloader):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        run = self._generation.run
        self._evaluation = DividedEvaluation(self, run, dataloader, seed=seed_of(self))
        try:
            with self._evaluation.in_loop():
                return super().evaluation_loop(self._evaluation, *args, **kwargs)
        finally:
            self._evaluation = None

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a batch's results from the rank that has computed it, or compute it here."""

        def compute(batch: Any) -> Any:
            with as_only_process(self) if is_grpo(self) else nullcontext():
                return super(ResilientTrainer, self).prediction_step(model, batch, *args, **kwargs)

        if self._generation is not None:
            self._generation.run.check()  # leave as soon as the ranks change
        if self._evaluation is not None and isinstance(inputs, PlaceOfBatch):
            return self._evaluation.step(inputs, compute)
        return compute(inputs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Let rank 0 write the model, whole."""
        with nullcontext() if self._generation is None else self._generation.lifted():
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let rank 0 write the directory ``checkpoint-N``."""
        if self._generation is None:
            super()._save_checkpoint(model, trial)
            return
        with self._generation.run.pause(), self._generation.lifted():
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
