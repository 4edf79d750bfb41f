"""The state of a fit beside module, optimizer and schedules, as one entry of the run's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from holdfast.adapters.lightning.fitting.accepted import is_own
from holdfast.adapters.lightning.fitting.attributes import (
    KeptAttributes,
    Owner,
    detached,
    first_difference,
    modules_of,
)
from holdfast.adapters.lightning.fitting.later import Later, SavedFiles
from holdfast.adapters.lightning.fitting.results import restore_results, saved_results
from holdfast.elastic import ConfigError

_MODULE: Final = "module"


class KeptFit:
    """A Stateful with what hooks, callbacks and loops count; it changes between steps only.

    ``name`` is the name of the run for its logs. All else is that of rank 0 after a restore.
    """

    def __init__(
        self,
        trainer: Any,
        loggers: Sequence[Any],
        *,
        later: Later,
        files: SavedFiles,
        name: str,
    ) -> None:
        self._trainer, self._loggers = trainer, loggers
        self._later, self._files = later, files
        self.name = name
        self._attributes = _attributes_of(trainer)
        self._owners = {
            key: each
            for key, each in _stateful(trainer).items()
            if is_own(each, "state_dict") and is_own(each, "load_state_dict")
        }
        self._changed: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self.collect()

    def collect(self) -> None:
        """Take the values as they are at the end of a step."""
        trainer = self._trainer
        self._changed = self._attributes.collect()
        self._values = {
            "attributes": self._changed,
            "states": {
                key: detached(dict(each.state_dict())) for key, each in self._owners.items()
            },
            "loops": detached(trainer.fit_loop.state_dict()),
            "results": saved_results(trainer),
            "versions": [each.version for each in self._loggers],
            "name": self.name,
            "should_stop": trainer.should_stop,
        }

    def begin_pass(self) -> None:
        """Note the attributes before a pass."""
        self._changed = self._attributes.collect()

    def end_pass(self) -> None:
        """Raise ``ConfigError`` if a microbatch changed an attribute: each rank has others."""
        if name := first_difference(self._changed, self._attributes.collect()):
            raise ConfigError(
                f"fit: training_step changed {name}: each rank has other microbatches, so it would "
                "differ between ranks: log the value by self.log, make a buffer of a running mean, "
                "or change it in on_train_batch_end"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        later, files = self._later, self._files
        return {
            **self._values,
            "waiting": [list(each) for each in later.waiting],
            "files": sorted(files.known),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Give all parts the saved values."""
        trainer = self._trainer
        self.name = saved["name"]
        for logger, version in zip(self._loggers, saved["versions"], strict=True):
            logger._version = version
        self._attributes.restore(saved["attributes"])
        for key, each in self._owners.items():
            each.load_state_dict(detached(saved["states"][key]))
        loop = trainer.fit_loop
        loop.load_state_dict(saved["loops"])
        loop.restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
        restore_results(trainer, saved["results"])
        trainer.should_stop = saved["should_stop"]
        self._later.waiting = [list(each) for each in saved["waiting"]]
        self._files.known = set(saved["files"])
        self.collect()


def _attributes_of(trainer: Any) -> KeptAttributes:
    module = trainer.lightning_module
    ignored = frozenset(vars(LightningModule())) | frozenset(vars(nn.Module()))
    parts = {
        f"{_MODULE}.{name}" if name else _MODULE: each for name, each in module.named_modules()
    }
    owners = [
        Owner(name, each, ignored)
        for name, each in parts.items()
        if isinstance(each, LightningModule)
    ]
    for name, each in parts.items():
        if isinstance(each, Metric):
            # Ranks validate on all batches each, so that there is nothing to add up over them.
            each.sync_on_compute = each.dist_sync_on_step = each._to_sync = False
            kept = {*each._defaults, "_update_count", "_computed"}
            owners.append(Owner(name, each, frozenset(vars(each)) - kept))
    owners += [Owner(key, each) for key, each in _callbacks(trainer).items()]
    return KeptAttributes(owners, tracked=modules_of(module) | {id(trainer)})


def _callbacks(trainer: Any) -> dict[str, Any]:
    return {
        f"{type(each).__name__} {number}": each for number, each in enumerate(trainer.callbacks)
    }


def _stateful(trainer: Any) -> dict[str, Any]:
    found = _callbacks(trainer)
    return found if trainer.datamodule is None else {**found, "data": trainer.datamodule}
