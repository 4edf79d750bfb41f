"""The logger that a module and its callbacks see: its points wait for their step's protection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast.adapters.lightning.fitting.later import Later
from holdfast.elastic import ConfigError

_READ: Final = ("log_dir", "name", "root_dir", "save_dir", "version")


class HeldLogger:
    """A logger of Lightning, of which ``index`` is the number; nothing is written at once.

    ``shown`` returns the step to show for points without one.
    """

    def __init__(self, logger: Any, later: Later, *, index: int, shown: Callable[[], int]) -> None:
        self._logger, self._later, self._index, self._shown = logger, later, index, shown
        self.hparams: dict[str, Any] | None = None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep points until their step is protected."""
        values = {name: _number(value) for name, value in metrics.items()}
        shown = self._shown() if step is None else int(step)
        self._later.add("points", [self._index, values, shown])

    def log_hyperparams(self, params: Any = None, *_: Any, **__: Any) -> None:
        """Keep the hyper-parameters, which are written with the first points."""
        found = params if isinstance(params, Mapping) else vars(params or {})
        self.hparams = {**(self.hparams or {}), **found}

    def log_graph(self, *_: Any, **__: Any) -> None:
        """Do nothing, as the loggers that are supported."""

    def save(self) -> None:
        """Do nothing: each step is written as a whole."""

    def after_save_checkpoint(self, *_: Any) -> None:
        """Do nothing, as the loggers that are supported."""

    def __getattr__(self, name: str) -> Any:
        if name in _READ:
            return getattr(self._logger, name)
        if name.startswith("_"):
            raise AttributeError(name)
        raise ConfigError(
            f"fit: {type(self._logger).__name__}.{name} would write at once, and again if the step "
            "is repeated: log numbers by self.log or logger.log_metrics, and write others after "
            "`fit` has returned"
        )


def _number(value: Any) -> float:
    """Return a number of Python's; one that is whole stays so."""
    return value if type(value) is int else float(value)
