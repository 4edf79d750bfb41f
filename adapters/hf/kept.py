"""The state of a Trainer beside model, optimizer and scheduler: tracked, and as it was at first."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import torch
from transformers.trainer_callback import ExportableState

_COUNTERS: Final = (
    "_globalstep_last_logged",
    "_total_loss_scalar",
    "_total_train_tokens",
    "current_flos",
)
"""Numbers of a Trainer that steps move on; TRL's trainers have the third."""

TOTAL: Final = "num_tokens"
"""The metric of TRL's trainers that is a running sum."""

_PENDING: Final = ("_pending_metrics", "_pending_extra_logs")
"""Notes of a GRPOTrainer's reward functions about a batch that is not scored yet."""

_NOT_KEPT: Final = (
    "is_local_process_zero",
    "is_world_process_zero",
    "is_hyper_param_search",
    "trial_name",
    "trial_params",
    "stateful_callbacks",
    "max_steps",
    "num_train_epochs",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "train_batch_size",
)
"""Fields of TrainerState that follow from the arguments and the rank."""


class KeptTrainer:
    """A Stateful with what a Trainer counts, logs and decides; it changes between steps only.

    ``waiting`` has the logs that no callback has got yet, as pairs of a step's number and logs.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.waiting: list[tuple[int, dict[str, Any]]] = []
        self._values: dict[str, Any] = {}
        self.collect()

    def collect(self) -> None:
        """Take the values of the Trainer as they are at the end of a step."""
        trainer = self._trainer
        names = [field.name for field in dataclasses.fields(trainer.state)]
        state = {name: getattr(trainer.state, name) for name in names if name not in _NOT_KEPT}
        state["log_history"] = list(state["log_history"])
        self._values = {
            "state": state,
            "callbacks": [each.state() for each in exportable(trainer)],
            "loss": float(trainer._tr_loss),
            "counters": {n: getattr(trainer, n) for n in _COUNTERS if hasattr(trainer, n)},
            "metrics": {key: list(each) for key, each in metrics_of(trainer).items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return {**self._values, "waiting": [list(each) for each in self.waiting]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Give the Trainer the saved values."""
        trainer = self._trainer
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        for each, one in zip(exportable(trainer), saved["callbacks"], strict=True):
            for name, value in one["attributes"].items():
                setattr(each, name, value)
        trainer._tr_loss = torch.tensor(saved["loss"], device=trainer.args.device)
        for name, value in saved["counters"].items():
            setattr(trainer, name, value)
        found = metrics_of(trainer)
        found.clear()
        found.update({key: list(each) for key, each in saved["metrics"].items()})
        self.waiting = [(step, logs) for step, logs in saved["waiting"]]
        self.collect()


class FirstState:
    """The state with which training begins, for a generation that has nothing to restore.

    The script's model is trained in place, so its weights that train and its buffers are copied.
    Of a model that will be cut the weights stay as they are, and are not copied.
    """

    def __init__(self, trainer: Any, *, is_cut: bool = False) -> None:
        self._trainer = trainer
        model = trainer.model
        moving = [p for p in model.parameters() if p.requires_grad and not is_cut]
        self._tensors = [(t, t.detach().clone()) for t in [*moving, *model.buffers()]]
        self._callbacks = [copy.deepcopy(each.state()) for each in exportable(trainer)]
        self._given = (trainer.optimizer, trainer.lr_scheduler)
        self._states = [copy.deepcopy(x.state_dict()) if x else None for x in self._given]
        self._counters = {n: getattr(trainer, n) for n in _COUNTERS if hasattr(trainer, n)}
        self.is_dropped = False

    def put_back(self) -> None:
        """Give model, optimizer, scheduler and callbacks their first state.

        Without the copies of `drop_tensors` the weights stay as they are.
        """
        trainer = self._trainer
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        trainer.model.zero_grad(set_to_none=True)
        trainer.optimizer, trainer.lr_scheduler = self._given
        for given, state in zip(self._given, self._states, strict=True):
            if given is not None:
                given.load_state_dict(copy.deepcopy(state))
        for each, one in zip(exportable(trainer), self._callbacks, strict=True):
            for name, value in copy.deepcopy(one["attributes"]).items():
                setattr(each, name, value)
        for name, value in self._counters.items():
            setattr(trainer, name, value)
        for mode in ("train", "eval"):  # an evaluation may have been interrupted, too
            metrics_of(trainer, mode).clear()
        for name in _PENDING:
            getattr(trainer, name, {}).clear()

    def drop_tensors(self) -> None:
        """Free the copies: a step is protected, and a restore has another source."""
        self._tensors, self.is_dropped = [], True


def exportable(trainer: Any) -> list[Any]:
    """Return the callbacks with state, and the control."""
    found = [*trainer.callback_handler.callbacks, trainer.control]
    return [each for each in found if isinstance(each, ExportableState)]


def metrics_of(trainer: Any, mode: str = "train") -> dict[str, list[Any]]:
    """Return the lists of numbers that TRL's trainers collect until the next log.

    ``mode`` is ``train`` or ``eval``.
    """
    found: dict[str, dict[str, list[Any]]] = getattr(trainer, "_metrics", {})
    empty: Callable[[], dict[str, list[Any]]] = lambda: defaultdict(list)  # noqa: E731
    return found.get(mode, empty())
