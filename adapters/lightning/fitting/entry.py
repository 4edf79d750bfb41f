"""`fit`, which imports Lightning when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.adapters.lightning.fitting.accepted import check_options
from holdfast.elastic import ConfigError, Run


def fit(
    run: Run,
    module: Any,
    data: Any = None,
    val_data: Any = None,
    *,
    callbacks: Sequence[Any] = (),
    loggers: Sequence[Any] = (),
    **options: Any,
) -> Any:
    """Train a LightningModule in Holdfast's loop; return the Trainer that hooks and callbacks saw.

    Call it in a function under `holdfast.resilient`, which builds ``module``, ``callbacks`` and
    ``loggers``. ``data`` is a LightningDataModule or a DataLoader of microbatches, ``val_data`` one
    DataLoader or several; without them the module's own are taken. A step, which is a batch of
    Lightning's, has as many microbatches as `Batch` says. ``options`` are arguments of Lightning's
    Trainer, such as ``max_epochs``, ``gradient_clip_val`` or ``val_check_interval``.

    Raises ``ConfigError`` for all that is not supported, with a remedy.
    """
    check_options(options)
    for name, value in (("callbacks", callbacks), ("loggers", loggers)):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"fit({name}={type(value).__name__}): give a list, {name}=[...]")
    try:
        from holdfast.adapters.lightning.fitting.driving import FitOfGeneration
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"fit needs Lightning ({error}): pip install 'holdfast[lightning]'"
        ) from error
    made = FitOfGeneration(run, module, callbacks=callbacks, loggers=loggers, options=options)
    return made.fit(data, val_data)
