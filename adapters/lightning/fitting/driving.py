"""A fit in one generation: its set-up as by Lightning's Trainer, and its steps."""

from __future__ import annotations

import secrets
import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.loops.utilities import _parse_loop_limits
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from holdfast.adapters.lightning.fitting.accepted import (
    check_built_inside,
    check_callback,
    check_hooks,
    check_logger,
    is_own,
)
from holdfast.adapters.lightning.fitting.held_logger import HeldLogger
from holdfast.adapters.lightning.fitting.kept import KeptFit
from holdfast.adapters.lightning.fitting.later import Later, SavedFiles
from holdfast.adapters.lightning.fitting.log_files import KINDS, LogFiles, Point
from holdfast.adapters.lightning.fitting.loops import (
    FitLoopOfRank,
    RankTrainer,
    apart_randomness,
)
from holdfast.adapters.lightning.fitting.ranks import RankStrategy
from holdfast.adapters.lightning.fitting.stepping import StepOfFit
from holdfast.ckpt.errors import HoldfastError
from holdfast.elastic import ConfigError, Run, session_of
from holdfast.elastic.loop.trace.traced_run import TracedRun

_ENTRY: Final = "fit"
_used: weakref.WeakSet[Any] = weakref.WeakSet()
"""The modules and callbacks that a generation of this process has trained with."""


class FitOfGeneration:
    """The fit of one generation; ``options`` are those of Lightning's Trainer."""

    def __init__(
        self,
        run: Run,
        module: Any,
        *,
        callbacks: Sequence[Any],
        loggers: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        self._run, self._module, self._given = run, module, list(loggers)
        _check_module(run, module)
        for each in callbacks:
            check_callback(each)
        kinds = [check_logger(each) for each in loggers]
        _check_as_new(module, callbacks)
        # `holdfast check` compares runs, which must not see or replace each other's files.
        self._is_trial = isinstance(run, TracedRun)
        leads = run.is_leader and not self._is_trial
        self._later = Later(lambda: run.completed, leads=leads)
        self._files = SavedFiles(self._later, leads=leads)
        self._kinds = kinds
        self._logs: list[LogFiles] = []
        self.trainer = self._made(callbacks, dict(options))

    def _made(self, callbacks: Sequence[Any], options: dict[str, Any]) -> Any:
        trainer = RankTrainer(
            accelerator="cpu",
            devices=1,
            strategy=RankStrategy(self._run, self._files),
            logger=False,
            callbacks=list(callbacks),
            enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **options,
        )
        for each in self._given if self._is_trial else ():
            each._version = 0
        trainer.fit_loop = FitLoopOfRank(trainer, self._run)
        trainer.loggers = [
            HeldLogger(each, self._later, index=number, shown=lambda: self._shown)
            for number, each in enumerate(self._given)
        ]
        trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
        trainer.training = True
        return trainer

    @property
    def _shown(self) -> int:
        return int(self.trainer.fit_loop.epoch_loop._batches_that_stepped)

    def fit(self, data: Any, val_data: Any) -> Any:
        """Train until the end; return the Trainer."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
                self._set_up(data, val_data)
                self._train()
        except HoldfastError:
            raise
        except Exception as error:
            call._call_callback_hooks(self.trainer, "on_exception", error)
            raise
        return self.trainer

    def _set_up(self, data: Any, val_data: Any) -> None:
        """Do what the Trainer does before its loop."""
        trainer, module = self.trainer, self._module
        as_module = isinstance(data, LightningDataModule)
        if as_module and val_data is not None:
            raise ConfigError(
                "fit: a LightningDataModule has its own validation: leave val_data out"
            )
        trainer._data_connector.attach_data(
            module,
            train_dataloaders=None if as_module else data,
            val_dataloaders=val_data,
            datamodule=data if as_module else None,
        )
        trainer.fit_loop.min_epochs, trainer.fit_loop.max_epochs = _parse_loop_limits(
            trainer.min_steps, trainer.max_steps, trainer.min_epochs, trainer.max_epochs, trainer
        )
        trainer.strategy.connect(module)
        trainer._callback_connector._attach_model_callbacks()
        trainer._callback_connector._attach_model_logging_functions()
        for each in trainer.callbacks:
            check_callback(each)
        _verify_loop_configurations(trainer)
        trainer.strategy.setup_environment()
        self._prepare_data()
        if trainer.datamodule is not None:
            call._call_lightning_datamodule_hook(trainer, "setup", stage="fit")
        call._call_callback_hooks(trainer, "setup", stage="fit")
        call._call_lightning_module_hook(trainer, "setup", stage="fit")
        if is_own(module, "configure_model"):
            module._device_mesh = self._run.data_mesh
        call._call_configure_model(trainer)
        trainer._logger_connector.reset_results()
        trainer._logger_connector.reset_metrics()
        trainer.strategy.setup(trainer)
        call._call_callback_hooks(trainer, "on_fit_start")
        call._call_lightning_module_hook(trainer, "on_fit_start")
        if trainer.enable_autolog_hparams:
            _log_hyperparams(trainer)

    def _prepare_data(self) -> None:
        """Let one rank of each node prepare the data, the others wait."""
        run, trainer = self._run, self.trainer
        owners = [each for each in (trainer.datamodule, self._module) if each is not None]
        if not any(is_own(each, "prepare_data") for each in owners):
            return
        members = session_of(run).members
        first = {each.node: each.rank for each in reversed(members)}
        with run.pause():
            if run.rank in first.values() or not members:
                for each in owners:
                    each.prepare_data()
            if run.world_size > 1:
                dist.barrier()

    def _train(self) -> None:
        trainer, run, loop = self.trainer, self._run, self.trainer.fit_loop
        loop.setup_data()
        with apart_randomness(run, "sanity check"):
            trainer._run_sanity_check()
        loop.reset()
        loop.on_run_start()
        kept = self._track()
        work = StepOfFit(trainer, run, kept)
        run.on_protected(lambda step, _: self._hand_over(step))
        for _ in run.steps(self._total()):
            work.make()
            kept.collect()
        if run.world_size > 1:
            dist.barrier()  # files of the last step have their names on rank 0 before
        self._end()

    def _track(self) -> KeptFit:
        trainer, run = self.trainer, self._run
        name = "" if self._is_trial else secrets.token_hex(8)
        kept = KeptFit(trainer, self._given, later=self._later, files=self._files, name=name)
        for each in trainer.checkpoint_callbacks:
            each.file_exists = lambda path, _: self._files.exists(str(_absolute(path)))
            if not self._is_trial:
                self._files.begin(_absolute(each.dirpath), each.FILE_EXTENSION)
        session_of(run).count_on_leader(_ENTRY)
        run.track(
            model=self._module,
            optimizer=trainer.optimizers[0],
            schedules=[each.scheduler for each in trainer.lr_scheduler_configs],
            **{_ENTRY: kept},
        )
        self._logs = [
            KINDS[kind](logger, run=kept.name, hparams=held.hparams)
            for kind, logger, held in zip(self._kinds, self._given, trainer.loggers, strict=True)
        ]
        return kept

    def _total(self) -> int:
        trainer, batches = self.trainer, self.trainer.fit_loop.max_batches
        by_epochs = None if trainer.max_epochs == -1 else trainer.max_epochs * batches
        by_steps = None if trainer.max_steps == -1 else trainer.max_steps
        limits = [each for each in (by_epochs, by_steps) if each is not None]
        if not limits:
            raise ConfigError("fit(max_epochs=-1): give max_steps, or a number of epochs")
        return int(min(limits))

    def _hand_over(self, step: int) -> None:
        """Write what waits for the steps up to this one; rank 0 only."""
        self._later.act(step, {"file": self._files.act, "points": self._write})

    def _write(self, step: int, points: list[Any]) -> None:
        for number, log in enumerate(self._logs):
            mine: list[Point] = [
                (values, shown) for index, values, shown in points if index == number
            ]
            if mine:
                log.write(step, mine)

    def _end(self) -> None:
        """Do what the Trainer does after its loop."""
        trainer = self.trainer
        trainer.fit_loop.on_run_end()
        trainer.fit_loop.teardown()
        trainer._logger_connector.teardown()
        call._call_callback_hooks(trainer, "on_fit_end")
        call._call_lightning_module_hook(trainer, "on_fit_end")
        if trainer.datamodule is not None:
            call._call_lightning_datamodule_hook(trainer, "teardown", stage="fit")
        call._call_callback_hooks(trainer, "teardown", stage="fit")
        call._call_lightning_module_hook(trainer, "teardown", stage="fit")
        self._module._current_fx_name = None
        self._hand_over(self._run.completed)
        self._files.finish()
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None


def _check_module(run: Run, module: Any) -> None:
    if not isinstance(module, LightningModule):
        raise ConfigError(
            f"fit: {type(module).__name__} is no lightning.pytorch.LightningModule: give one "
            "(with `import lightning`, not `import pytorch_lightning`)"
        )
    if not module.automatic_optimization:
        raise ConfigError(
            "fit: manual optimization (automatic_optimization=False) is not supported: write the "
            "loop with run.step, also for several optimizers and GANs "
            "(docs/how-to/port-your-loop.md)"
        )
    check_hooks(module)
    if run.device.type != "cpu":
        raise ConfigError(
            f"fit: the run is on {run.device}; this adapter has run on the CPU only: leave "
            "Mesh(device=...) out, or write the loop with run.device"
        )


def _check_as_new(module: Any, callbacks: Sequence[Any]) -> None:
    """Raise ``ConfigError`` for objects that an earlier generation has used, or may have."""
    namespaces = [vars(each) for each in list(sys.modules.values()) if hasattr(each, "__dict__")]
    for name, each in (("module", module), *(("callback", each) for each in callbacks)):
        check_built_inside(name, each, namespaces)
        if each in _used:
            raise ConfigError(
                f"fit: the {name} {type(each).__name__} was given to `fit` before, so it is not as "
                "new: build it in the decorated function, next to the call"
            )
        _used.add(each)


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()
