"""The passes of a GRPOTrainer's steps: each microbatch trains on a slice of a round."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.adapters.hf.grpo.buffered import BufferedRounds
from holdfast.adapters.hf.grpo.exchange import of_all_microbatches
from holdfast.adapters.hf.grpo.finished import FinishedWork
from holdfast.adapters.hf.grpo.ledger_rounds import LedgerOfRounds
from holdfast.adapters.hf.grpo.prompts import Prompts
from holdfast.adapters.hf.grpo.sampling import RoundSampler
from holdfast.adapters.hf.grpo.shape import Epochs, RoundShape
from holdfast.adapters.hf.grpo.values import decode, encode
from holdfast.adapters.hf.kept import metrics_of
from holdfast.adapters.hf.ledger_rollouts import LedgerRollouts
from holdfast.adapters.hf.microbatches import MicrobatchesOfTrainer
from holdfast.adapters.hf.ranks import as_only_process
from holdfast.elastic import Run, session_of

_ENTRY: Final = "rounds"
_LEDGER: Final = "rollouts"
_TIME: Final = "step_time"


class MicrobatchesOfGrpo(MicrobatchesOfTrainer):
    """The passes of one generation; ``made`` is the Trainer's own DataLoader.

    ``loader`` gives a microbatch its number in the epoch. The rounds that begin in a step are
    sampled at its begin, from the weights that all of its microbatches have. ``planned`` returns
    the steps of the training from those of an epoch.
    """

    def __init__(
        self,
        trainer: Any,
        run: Run,
        made: Any,
        shape: RoundShape,
        *,
        planned: Callable[[int], int],
    ) -> None:
        prompts = Prompts(trainer, made, shape, seed=session_of(run).seed)
        self._epochs = Epochs(microbatches=prompts.microbatches, most=shape.microbatches)
        numbers = range(prompts.microbatches)
        loader = run.loader(
            numbers, batch=shape.microbatches, shuffle=False, collate_fn=operator.itemgetter(0)
        )
        super().__init__(trainer, run, loader)
        finished = FinishedWork(run)
        self._rounds = BufferedRounds(shape, self._epochs, finished)
        self._ledger: LedgerOfRounds | None = None
        if isinstance(trainer.rollout_func, LedgerRollouts):
            session_of(run).count_on_leader(_LEDGER)
            steps = planned(len(self.loader))
            self._ledger = LedgerOfRounds(
                trainer, run, shape, prompts=prompts, epochs=self._epochs, steps=steps
            )
        self._sampler = RoundSampler(
            trainer, run, shape, prompts=prompts, finished=finished, ledger=self._ledger
        )
        self._epoch = 0
        self._found = list[bytes]()

    def tracked(self) -> dict[str, Any]:
        """Return the entries of the state that belong to the passes."""
        if self._ledger is None:
            return {_ENTRY: self._rounds}
        return {_ENTRY: self._rounds, _LEDGER: self._ledger.rollouts}

    def serving(self) -> AbstractContextManager[None]:
        """Return a context for the steps, in which other processes may sample."""
        return nullcontext() if self._ledger is None else self._ledger.serving()

    def resume(self, folder: str) -> None:
        """Take what a ``checkpoint-N`` has beside the Trainer's own files."""
        self._rounds.load(Path(folder), self._run.completed)
        if self._ledger is not None:
            self._ledger.load(Path(folder), self._run.completed)

    def save(self, folder: Path) -> None:
        """Write that into a ``checkpoint-N``."""
        self._rounds.save(folder)
        if self._ledger is not None:
            self._ledger.save(folder)

    def run_pass(self) -> float:
        """Make the mean gradient of the step; return its loss."""
        begun, step = time.perf_counter(), self._run.completed
        self._epoch, microbatches = self._epochs.of_step(step)
        if rounds := self._rounds.missing(step):
            for each, slices in zip(rounds, self._sampler.sample(rounds), strict=True):
                self._rounds.add(*each, slices)
        metrics = metrics_of(self._trainer)
        before, self._found = {key: list(values) for key, values in metrics.items()}, []
        loss = super().run_pass()
        metrics.clear()
        metrics.update(self._joined(before))
        metrics[_TIME] = [*before.get(_TIME, []), time.perf_counter() - begun]
        self._trainer._step = self._counted(microbatches.stop)
        self._rounds.drop_spent(step + 1)
        return loss

    def _joined(self, before: dict[str, list[float]]) -> dict[str, list[float]]:
        """Return the metrics with those of all ranks' microbatches, each as TRL collects it."""
        found = {key: list(values) for key, values in before.items()}
        for data in filter(None, of_all_microbatches(self._run, self._found)):
            for key, values in decode(data).items():
                found.setdefault(key, []).extend(values)
        return found

    def _counted(self, microbatch: int) -> int:
        """Return the number of a microbatch in all epochs, as TRL counts them."""
        return self._epoch * self._epochs.microbatches + microbatch

    def _items(self, inputs: Any) -> None:
        return None

    def _weigh(self, inputs: Any) -> float:
        return 1.0

    def _seen_tokens(self) -> int:
        return int(self._trainer.state.num_input_tokens_seen)

    def _train(self, inputs: Any) -> torch.Tensor:
        part = self._rounds.at(self._epoch, inputs)
        self._trainer._step = self._counted(inputs)
        with as_only_process(self._trainer), self._prepared(part):
            loss = super()._train(part)
        found = metrics_of(self._trainer)
        found.pop(_TIME, None)
        self._found.append(encode(dict(found), what="the metrics"))
        return loss

    @contextmanager
    def _prepared(self, part: dict[str, Any]) -> Iterator[None]:
        """Let the Trainer take a slice as the input of its step."""
        self._trainer._prepare_inputs = lambda _: part
        try:
            yield
        finally:
            del self._trainer._prepare_inputs
