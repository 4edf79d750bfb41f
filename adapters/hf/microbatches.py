"""A pass over the microbatches of a Trainer's step: losses, weights, and what they count.

Each microbatch is one call of `training_step`, so a subclass keeps what it does there. Its loss is
the mean over the microbatch, and Holdfast weights it by label tokens where transformers would
divide by ``num_items_in_batch``, else by samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers.trainer_pt_utils import find_batch_size

from holdfast.adapters.hf.kept import TOTAL, metrics_of
from holdfast.elastic import ConfigError, Loader, Run


class MicrobatchesOfTrainer:
    """The passes of one generation; ``loader`` gives the Trainer's own batches."""

    def __init__(self, trainer: Any, run: Run, loader: Loader) -> None:
        self._trainer, self._run = trainer, run
        self.loader: Any = loader
        trainer.accelerator.backward = self._backward

    def tracked(self) -> dict[str, Any]:
        """Return the entries of the state that belong to the passes."""
        return {}

    def resume(self, folder: str) -> None:
        """Take what a ``checkpoint-N`` has beside the Trainer's own files."""

    def save(self, folder: Path) -> None:
        """Write that into a ``checkpoint-N``."""

    def serving(self) -> AbstractContextManager[None]:
        """Return a context for the steps, entered on all ranks once the state is tracked."""
        return nullcontext()

    def run_pass(self) -> float:
        """Make the mean gradient of the step; return the mean loss of all ranks' microbatches."""
        trainer, run = self._trainer, self._run
        metrics = metrics_of(trainer)
        before = {key: list(values) for key, values in metrics.items()}
        base, counts, names = self._counts(), [], dict[str, None]()
        for inputs in run.microbatches(self.loader, weigh=self._weigh):
            metrics.clear()
            loss = self._train(inputs)
            means = _means(metrics)
            run.log(loss=loss, **means)
            names |= dict.fromkeys(means)
            counts.append(self._counts() - base)
            self._set_counts(base)
        has_total = TOTAL in metrics
        self._set_counts(base + run.reduce(counts, "sum"))
        metrics.clear()
        metrics.update(before)
        for name in names:
            metrics[name] = [*before.get(name, []), run.metrics[name]]
        if has_total:
            metrics[TOTAL] = [self._seen_tokens()]
        return run.metrics["loss"]

    def _train(self, inputs: Any) -> torch.Tensor:
        trainer = self._trainer
        items = self._items(inputs)
        if items is None and trainer.compute_loss_func is not None:
            raise ConfigError(
                "resilient_trainer: compute_loss_func needs batches with labels of their own, "
                "whose number weights a microbatch: have the collator return `labels`, or override "
                "compute_loss"
            )
        if isinstance(items, torch.Tensor):
            items = items.clamp(min=1)
        loss: torch.Tensor = trainer.training_step(trainer.model, inputs, items)
        trainer.current_flos += float(trainer.floating_point_ops(inputs))
        trainer._track_num_input_tokens(inputs)
        return loss

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Stand in for ``accelerator.backward``."""
        self._run.backward(loss)

    def _items(self, inputs: Any) -> Any:
        return self._trainer._get_num_items_in_batch([inputs], self._trainer.args.device)

    def _weigh(self, inputs: Any) -> float:
        """Return the label tokens of a microbatch, or its samples if the loss is a mean of them."""
        items = self._items(inputs)
        return float((find_batch_size(inputs) or 1) if items is None else items)

    def _seen_tokens(self) -> int:
        return int(self._trainer._total_train_tokens)

    def _counts(self) -> torch.Tensor:
        trainer = self._trainer
        found = (
            trainer.current_flos,
            trainer.state.num_input_tokens_seen,
            getattr(trainer, "_total_train_tokens", 0),
        )
        return torch.tensor([float(each) for each in found], dtype=torch.float64)

    def _set_counts(self, counts: torch.Tensor) -> None:
        trainer = self._trainer
        flos, seen, tokens = counts.tolist()
        trainer.current_flos, trainer.state.num_input_tokens_seen = flos, int(seen)
        if hasattr(trainer, "_total_train_tokens"):
            trainer._total_train_tokens = int(tokens)


def _means(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each metric of one microbatch; NaN stands for none."""
    found = {
        key: [each for each in values if not math.isnan(each)] for key, values in metrics.items()
    }
    return {key: fmean(values) for key, values in found.items() if key != TOTAL and values}
