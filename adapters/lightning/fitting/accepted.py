"""The options, hooks, callbacks and loggers that `fit` supports; the rest is refused by name.

No part of Lightning is imported here: its classes are known by their names. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from holdfast.elastic import ConfigError

_LIBRARIES: Final = ("lightning.", "lightning_utilities.", "pytorch_lightning.", "torch.")

OPTIONS: Final = (
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "limit_val_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "log_every_n_steps",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
    "default_root_dir",
    "enable_autolog_hparams",
)
"""Arguments of Lightning's Trainer that have their meaning in `fit`."""

_PRECISIONS: Final = (None, 32, "32", "32-true", "bf16-mixed", "bf16")

_OPTION_REMEDIES: Final[Mapping[str, str]] = {
    "accumulate_grad_batches": "set Batch(microbatches=...) in holdfast.resilient, on any number "
    "of ranks",
    "strategy": "leave it out; shard in configure_model by "
    "fully_shard(layer, mesh=self.device_mesh)",
    "devices": "leave it out: `holdfast run --nproc N` decides the number of ranks",
    "num_nodes": "leave it out: the launchers decide the number of nodes",
    "accelerator": "leave it out: the ranks are on CPUs",
    "logger": "give loggers=[CSVLogger(...)]",
    "max_time": "give max_steps or max_epochs: a clock differs between ranks",
    "limit_train_batches": "give a torch.utils.data.Subset, or max_steps",
    "limit_test_batches": "test with a Trainer of Lightning's, after `fit`",
    "limit_predict_batches": "predict with a Trainer of Lightning's, after `fit`",
    "overfit_batches": "give a torch.utils.data.Subset",
    "fast_dev_run": "give max_steps=1 and limit_val_batches=1",
    "enable_checkpointing": "leave it out: give a ModelCheckpoint in callbacks, or none",
    "enable_progress_bar": "leave it out: `holdfast status` shows the progress",
    "enable_model_summary": "leave it out, or give ModelSummary() in callbacks",
    "ckpt_path": "set checkpoint=Checkpoints(...) in holdfast.resilient, from which a later start "
    "goes on by itself",
    "detect_anomaly": "call torch.autograd.set_detect_anomaly before `fit`",
    "deterministic": "call torch.use_deterministic_algorithms before `fit`",
    "sync_batchnorm": "leave it out: BatchNorm's statistics are those of all microbatches",
    "plugins": "leave it out; precision='bf16-mixed' is supported",
    "profiler": "leave it out; torch.profiler in your function sees the steps",
    "reload_dataloaders_every_n_epochs": "give a data set that depends on the index alone",
    "train_dataloaders": "give it as data",
    "datamodule": "give it as data",
    "val_dataloaders": "give it as val_data",
}

_HOOKS: Final[Mapping[str, str]] = {
    "optimizer_step": "move it to on_before_optimizer_step or on_train_batch_end, or write the "
    "loop with run.step (docs/how-to/port-your-loop.md)",
    "optimizer_zero_grad": "leave it out: gradients are dropped after every step",
    "on_before_zero_grad": "move it to on_train_batch_end",
    "backward": "scale the loss that training_step returns",
    "configure_gradient_clipping": "give gradient_clip_val, or change gradients in "
    "on_before_optimizer_step",
    "configure_sharded_model": "rename it configure_model",
}
"""Hooks that the loop replaces, of a module or a callback."""

_CALLBACKS: Final = (
    "Callback",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
)

_CALLBACK_REMEDIES: Final[Mapping[str, str]] = {
    "GradientAccumulationScheduler": "set Batch(microbatches=...) in holdfast.resilient",
    "StochasticWeightAveraging": "keep a torch.optim.swa_utils.AveragedModel in the module, and "
    "update it in on_train_batch_end",
    "WeightAveraging": "keep a torch.optim.swa_utils.AveragedModel in the module, and update it in "
    "on_train_batch_end",
    "BaseFinetuning": "give the optimizer all parameters, and switch requires_grad_ in "
    "on_train_epoch_start",
    "Timer": "give max_steps or max_epochs: a clock differs between ranks",
    "ProgressBar": "leave it out: `holdfast status` shows the progress",
    "LearningRateFinder": "find the rate with a Trainer of Lightning's before",
    "BatchSizeFinder": "find the size with a Trainer of Lightning's before",
    "OnExceptionCheckpoint": "leave it out: every step is kept, see docs/how-to/snapshots.md",
}

_LOGGERS: Final = ("CSVLogger", "TensorBoardLogger")


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` that names the first argument of a Trainer that is not supported."""
    for name, value in options.items():
        if name not in OPTIONS:
            remedy = _OPTION_REMEDIES.get(name, f"give some of {', '.join(OPTIONS)}")
            raise ConfigError(f"fit({name}={value!r}) is not supported: {remedy}")
    if (precision := options.get("precision")) not in _PRECISIONS:
        raise ConfigError(
            f"fit(precision={precision!r}) is not supported: give '32-true', or 'bf16-mixed', "
            "which needs no GradScaler"
        )
    interval = options.get("val_check_interval")
    if interval is not None and not isinstance(interval, int | float):
        raise ConfigError(
            f"fit(val_check_interval={interval!r}) is not supported: give a number of steps or a "
            "part of an epoch: a clock differs between ranks"
        )


def check_hooks(owner: object) -> None:
    """Raise ``ConfigError`` that names the first hook of a module or callback that is replaced."""
    for name, remedy in _HOOKS.items():
        if is_own(owner, name):
            raise ConfigError(
                f"fit: {type(owner).__name__}.{name} has no meaning in Holdfast's loop: {remedy}"
            )


def is_own(owner: object, name: str) -> bool:
    """True if the script defines this method, and not Lightning or torch."""
    kinds = type(owner).__mro__
    found = next((each for each in kinds if name in vars(each)), None)
    return found is not None and not _is_theirs(found)


def check_callback(callback: Any) -> None:
    """Raise ``ConfigError`` unless a callback is supported, as it is set."""
    kinds = [each.__name__ for each in type(callback).__mro__ if _is_theirs(each)]
    first = kinds[0] if kinds else ""
    if first not in _CALLBACKS:
        remedy = next(
            (_CALLBACK_REMEDIES[each] for each in kinds if each in _CALLBACK_REMEDIES),
            f"give your own Callback, or one of {', '.join(_CALLBACKS[1:])}",
        )
        name = first or type(callback).__name__
        raise ConfigError(f"fit: the callback {name} is not supported: {remedy}")
    check_hooks(callback)
    if "ModelCheckpoint" in kinds:
        _check_checkpoint(callback)


def _check_checkpoint(callback: Any) -> None:
    wrong: Iterable[tuple[bool, str, str]] = (
        (
            callback._train_time_interval is not None,
            "train_time_interval",
            "give every_n_train_steps: a clock differs between ranks",
        ),
        (callback.save_last == "link", "save_last='link'", "give save_last=True"),
        (
            callback.save_on_exception,
            "save_on_exception",
            "leave it out: every step is kept, see docs/how-to/snapshots.md",
        ),
        (
            "://" in str(callback.dirpath),
            f"dirpath={str(callback.dirpath)!r}",
            "give a directory that all nodes see; checkpoint=Checkpoints('s3://...') in "
            "holdfast.resilient keeps the run in a store",
        ),
    )
    for is_wrong, name, remedy in wrong:
        if is_wrong:
            raise ConfigError(f"fit: ModelCheckpoint({name}) is not supported: {remedy}")


def check_logger(logger: Any) -> str:
    """Return the kind of a logger; raise ``ConfigError`` unless its points can be kept exact."""
    kinds = [each.__name__ for each in type(logger).__mro__ if _is_theirs(each)]
    kind = kinds[0] if kinds else type(logger).__name__
    if kind not in _LOGGERS:
        raise ConfigError(
            f"fit: the logger {kind} is not supported: give {' or '.join(_LOGGERS)}, or hand "
            "run.metrics to your service by a loop of your own with run.on_protected "
            "(docs/how-to/monitor.md)"
        )
    if getattr(logger, "_log_graph", False):
        raise ConfigError("fit: TensorBoardLogger(log_graph=True) is not supported: leave it out")
    if "://" in str(logger.save_dir):
        raise ConfigError(
            f"fit: {kind}(save_dir={str(logger.save_dir)!r}) is not supported: give a directory "
            "that all nodes see"
        )
    return kind


def check_built_inside(name: str, value: object, namespaces: Iterable[Mapping[str, Any]]) -> None:
    """Raise ``ConfigError`` if ``value`` is a global variable: the next generation has it used."""
    for namespace in namespaces:
        if any(each is value for each in list(namespace.values())):
            raise ConfigError(
                f"fit: the {name} {type(value).__name__} is a global variable, so after a change "
                "of the ranks it would not be as new: build it in the decorated function"
            )


def _is_theirs(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(_LIBRARIES)
