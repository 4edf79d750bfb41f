"""Values that `training_step` logs: collected by microbatch, then one value of the step.

They stand in for Lightning's results during a pass. Each rank has other microbatches, so the values
of all are gathered and reduced in their order, and Lightning gets one value, the same on all ranks.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from holdfast.elastic import ConfigError, Run

_FLAGS: Final = ("prog_bar", "logger", "on_step", "on_epoch")
_REDUCTIONS: Final = ("mean", "sum", "max", "min")
_STEP: Final = "training_step"
_NONE: Final = math.nan


class StepLogs:
    """The values of one pass; ``batch`` is the microbatch under way."""

    dataloader_idx: int | None = None

    def __init__(self, trainer: Any, run: Run) -> None:
        self._trainer, self._run = trainer, run
        self._found: list[dict[str, tuple[float, float, int]]] = []
        self.batch: Any = None
        self.batch_size: int | None = None

    def begin(self, batch: Any) -> None:
        """Begin a microbatch."""
        self.batch = batch
        self._found.append({})

    def reset(self, *_: Any, **__: Any) -> None:
        """Do nothing: the results themselves are reset when they get the values."""

    def log(self, fx: str, name: str, value: Any, **how: Any) -> None:
        """Keep a value of this microbatch; LightningModule.log calls it."""
        if fx != _STEP:
            raise ConfigError(f"fit: self.log({name!r}, ...) in {fx}: log it in training_step")
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"fit: self.log({name!r}, {type(value).__name__}) in training_step: each rank has "
                "other microbatches, and the object would follow those of its rank: log numbers, "
                "or update it in validation_step"
            )
        if name in self._found[-1]:
            raise ConfigError(
                f"fit: self.log({name!r}, ...) twice in one training_step: give two names"
            )
        kept = float(value.detach())
        size = how.get("batch_size")
        weight = float(self._size() if size is None else size)
        self._found[-1][name] = (kept, weight, _flags_of(how))
        self._run.log(**{name: kept})

    def _size(self) -> int:
        if self.batch_size is None:
            try:
                self.batch_size = int(extract_batch_size(self.batch))
            except MisconfigurationException as error:
                raise ConfigError(
                    f"fit: the size of the microbatch is not known ({error}): give "
                    "self.log(..., batch_size=...)"
                ) from error
        return self.batch_size

    def next(self) -> None:
        """End a microbatch."""
        self.batch = self.batch_size = None

    def hand_on(self, results: Any) -> None:
        """Give Lightning's results one value of each name, the same on all ranks; collective."""
        connector = self._trainer._logger_connector
        names = sorted(self._run.metrics)
        if not names:
            return
        rows = self._run.gather([self._table(names, each) for each in self._found], fill=_NONE)
        for column, name in enumerate(names):
            found = [
                (value, weight, int(flags))
                for value, weight, flags in rows[:, column].tolist()
                if not math.isnan(weight)
            ]
            if not found:
                continue
            value, weight, how = _reduced(name, found)
            if connector.should_reset_tensors(_STEP):
                results.reset(metrics=False, fx=_STEP)
            results.log(
                _STEP,
                name,
                torch.tensor(value, dtype=torch.float32),
                **how,
                sync_dist_fn=self._trainer.strategy.reduce,
                batch_size=round(weight),
            )
            connector._current_fx = _STEP

    def _table(self, names: list[str], found: dict[str, tuple[float, float, int]]) -> torch.Tensor:
        none = (_NONE, _NONE, _NONE)
        return torch.tensor([found.get(name, none) for name in names], dtype=torch.float64)


def _flags_of(how: dict[str, Any]) -> int:
    reduce = how.get("reduce_fx", "mean")
    word = reduce.lower() if isinstance(reduce, str) else getattr(reduce, "__name__", "")
    word = "mean" if word == "avg" else word
    if word not in _REDUCTIONS:
        raise ConfigError(
            f"fit: self.log(reduce_fx={reduce!r}): give one of {', '.join(_REDUCTIONS)}"
        )
    bits = sum(bool(how.get(name)) << place for place, name in enumerate(_FLAGS))
    return bits | _REDUCTIONS.index(word) << len(_FLAGS)


def _reduced(
    name: str, found: list[tuple[float, float, int]]
) -> tuple[float, float, dict[str, Any]]:
    """Return the value of a step, its weight in an epoch, and the arguments of `self.log`."""
    flags = found[0][2]
    if any(other != flags for _, _, other in found):
        raise ConfigError(f"fit: self.log({name!r}, ...) had different arguments in one step")
    word = _REDUCTIONS[flags >> len(_FLAGS)]
    weight = sum(each for _, each, _ in found)
    values = [value for value, _, _ in found]
    match word:
        case "mean":
            value = sum(one * its for one, its, _ in found) / weight if weight else math.nan
        case "sum":
            value = sum(values)
        case "max":
            value = max(values)
        case _:
            value = min(values)
    how: dict[str, Any] = {each: bool(flags >> place & 1) for place, each in enumerate(_FLAGS)}
    return value, weight, {**how, "reduce_fx": word}
