"""A step: a pass over the microbatches by `training_step`, an update, and Lightning's hooks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, NoReturn

import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.enums import GradClipAlgorithmType

from holdfast.adapters.lightning.fitting.accepted import is_own
from holdfast.adapters.lightning.fitting.kept import KeptFit
from holdfast.adapters.lightning.fitting.step_logs import StepLogs
from holdfast.elastic import ConfigError, Run

_EARLY: Final = ("on_train_epoch_start", "on_train_batch_start")
_LOSS: Final = "loss"


class BatchElsewhere:
    """The batch that hooks of a step get: each rank has microbatches of it, none has all."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse("batch")

    def __getitem__(self, _: object) -> NoReturn:
        _refuse("batch")

    def __iter__(self) -> NoReturn:
        _refuse("batch")

    def __len__(self) -> NoReturn:  # noqa: PLE0303 - it raises
        _refuse("batch")


class StepOutputs(dict[str, Any]):
    """The mean loss of a step; `training_step` returned other values for each microbatch."""

    def __missing__(self, _: str) -> NoReturn:
        _refuse("outputs")


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"fit: a hook of the step reads {what}: each rank has other microbatches, and the hook "
        "runs once for all of them: do it in training_step, and hand numbers on by self.log and "
        "trainer.callback_metrics"
    )


class StepOfFit:
    """The steps of one generation."""

    def __init__(self, trainer: Any, run: Run, kept: KeptFit) -> None:
        self._trainer, self._run, self._kept = trainer, run, kept
        self._module, self._loop = trainer.lightning_module, trainer.fit_loop
        owners = (self._module, *trainer.callbacks)
        self._changes_early = any(is_own(each, name) for each in owners for name in _EARLY)

    def make(self) -> None:
        """Make the present step: with its epoch's beginning and end, and its validation."""
        run, trainer, loop, epoch_loop = self._run, self._trainer, self._loop, self._loop.epoch_loop
        index = run.completed % loop.max_batches
        if self._changes_early:
            run.fence()  # for a hook that changes weights
        if index == 0:
            loop.on_advance_start()
            epoch_loop.reset()
        self._advance(index)
        epoch_loop.on_advance_end(None)
        stops = trainer.should_stop and loop._can_stop_early
        if index + 1 == loop.max_batches or epoch_loop._is_training_done or stops:
            loop.on_advance_end()
            stops = trainer.should_stop and loop._can_stop_early
        if stops:
            run.stop()

    def _advance(self, index: int) -> None:
        """Do what Lightning's loop does in one batch."""
        trainer, epoch_loop = self._trainer, self._loop.epoch_loop
        connector, progress = trainer._logger_connector, epoch_loop.batch_progress
        progress.is_last_batch = index + 1 == self._loop.max_batches
        progress.increment_ready()
        connector.on_batch_start(None)
        epoch_loop._results.batch_size = self._loop.loader.batch
        batch = BatchElsewhere()
        call._call_callback_hooks(trainer, "on_train_batch_start", batch, index)
        answer = call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, index)
        if answer == -1:
            raise ConfigError(
                "fit: on_train_batch_start returned -1, which is not supported: give fewer "
                "samples, or set trainer.should_stop"
            )
        progress.increment_started()
        self._run_pass(index)
        self._update()
        progress.increment_processed()
        epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if progress.is_last_batch:
            epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        outputs = StepOutputs({_LOSS: torch.tensor(self._run.metrics[_LOSS])})
        self._call("on_train_batch_end", outputs, batch, index)
        connector.on_batch_end()
        progress.increment_completed()
        connector.update_train_step_metrics()

    def _run_pass(self, index: int) -> None:
        """Make the mean gradient, and hand on the logged values; collective."""
        trainer, run, epoch_loop = self._trainer, self._run, self._loop.epoch_loop
        connector, results = trainer._logger_connector, epoch_loop._results
        logs, place = StepLogs(trainer, run), connector._current_fx
        self._kept.begin_pass()
        epoch_loop._results = logs
        try:
            for batch in run.microbatches(self._loop.loader):
                self._microbatch(batch, index, logs)
        finally:
            epoch_loop._results, connector._current_fx = results, place
        self._kept.end_pass()
        logs.hand_on(results)
        self._call("on_after_backward")

    def _microbatch(self, batch: Any, index: int, logs: StepLogs) -> None:
        trainer, module = self._trainer, self._module
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        logs.begin(batch)
        words = self._loop.epoch_loop._build_kwargs(OrderedDict(), batch, index)
        loss = loss_of(call._call_strategy_hook(trainer, "training_step", *words.values()))
        self._call("on_before_backward", loss)
        self._run.backward(loss)
        self._run.log(loss=loss)
        logs.next()

    def _update(self) -> None:
        trainer, run = self._trainer, self._run
        optimizer = trainer.optimizers[0]
        self._call("on_before_optimizer_step", optimizer)
        if limit := trainer.gradient_clip_val:
            if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
                torch.nn.utils.clip_grad_value_(self._module.parameters(), limit)
            else:
                run.clip_grad_norm_(self._module.parameters(), limit)
        run.step(optimizer)
        progress = self._loop.epoch_loop.automatic_optimization.optim_progress.optimizer
        progress.zero_grad.increment_ready()
        progress.zero_grad.increment_started()
        progress.zero_grad.increment_completed()
        progress.step.increment_ready()
        progress.step.increment_completed()

    def _call(self, hook: str, *args: Any) -> None:
        call._call_callback_hooks(self._trainer, hook, *args)
        call._call_lightning_module_hook(self._trainer, hook, *args)


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss that `training_step` returned. Raises ``ConfigError`` if there is none."""
    loss = output.get(_LOSS) if isinstance(output, dict) else output
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"fit: training_step returned {type(output).__name__} without a loss: return the loss "
            "of the microbatch, a tensor or a dict with 'loss'; to leave a microbatch out, return "
            "a loss of zero that depends on the weights, such as 0 * loss"
        )
    return loss
