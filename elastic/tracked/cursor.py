"""The cursor: the run's own progress, and the settings that its numbers depend on."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from holdfast.ckpt.types import Json
from holdfast.elastic.config import Exact, Settings
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.neighbors.marks import CURSOR, FIELD, ApproximateMark

KEY = CURSOR
"""The name under which the cursor is tracked, next to the user's state."""

_ONLY_EXACT = ("exact", "threads", "torch", "tp", "ep")

_RENAMED: dict[Json, Json] = {True: "float32", False: None}
"""Values of ``exact`` in cursors of older checkpoints, and their present names."""

_UNSAID: dict[str, Json] = {"tp": 1, "ep": 1}
"""Settings of runs whose cursor does not store them."""


class _SavedCursor(msgspec.Struct, kw_only=True):
    step: int
    fingerprint: dict[str, Json]
    metrics: dict[str, float]
    bounds: dict[str, int]
    loaders: dict[str, Json] = {}
    stopped: bool = False
    collects: bool = False
    handed: int = 0
    waiting: list[tuple[int, dict[str, float]]] = []
    modes: dict[str, bool] | None = None
    approximate: tuple[ApproximateMark, ...] = ()


class Cursor:
    """Completed steps, last metrics, gradient bounds and the positions of the data loaders.

    It is a Stateful, tracked with the user's state. ``stopped``: no further step follows.
    ``waiting`` are the metrics of steps that are not handed to loggers yet, if the run
    ``collects`` them; those of the first ``handed`` steps are. ``modes`` are those of
    `ModesOfModules`. ``tp`` is the number of ranks that add up a microbatch's work, ``ep`` the
    number of microbatches that an expert adds up at once. ``approximate`` has the marks of stages
    that were set from others; the state keeps them for good.
    """

    def __init__(self, settings: Settings, *, tp: int = 1, ep: int = 1) -> None:
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.bounds: dict[str, int] = {}
        self.loaders: dict[str, Json] = {}
        self.stopped = self.collects = False
        self.handed = 0
        self.waiting: list[tuple[int, dict[str, float]]] = []
        self.modes: dict[str, bool] = {}
        self.approximate: tuple[ApproximateMark, ...] = ()
        self._fingerprint: dict[str, Json] = {
            "seed": settings.seed,
            "microbatches": settings.batch.microbatches,
            "size": settings.batch.size,
            "exact": settings.exact,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "tp": tp,
            "ep": ep,
        }

    def adds_by(self, exact: Exact) -> None:
        """Note the method of exact sums, which the setting True leaves to the model."""
        self._fingerprint["exact"] = exact

    def places(self) -> dict[str, Json]:
        """Return the positions of the loaders, by name; entries put there are part of the state."""
        return self.loaders

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return {
            "step": self.step,
            "metrics": dict(self.metrics),
            "bounds": dict(self.bounds),
            "loaders": dict(self.loaders),
            "stopped": self.stopped,
            "collects": self.collects,
            "handed": self.handed,
            "waiting": [[step, dict(values)] for step, values in self.waiting],
            "modes": dict(self.modes),
            "fingerprint": dict(self._fingerprint),
            **({FIELD: [mark.plain() for mark in self.approximate]} if self.approximate else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state. Raises ``ConfigError`` naming the setting that differs."""
        try:
            saved = msgspec.convert(state, _SavedCursor)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"the saved state has no readable run cursor ({error}): it was not written by "
                "this version of elastic.resilient; choose another checkpoint directory"
            ) from error
        made = saved.fingerprint
        if isinstance(found := made.get("exact"), bool):
            made = {**made, "exact": _RENAMED[found]}
        exact = bool(made.get("exact")) and self._fingerprint["exact"]
        for name, now in self._fingerprint.items():
            then = made.get(name, _UNSAID.get(name))
            if then != now and (exact or name not in _ONLY_EXACT):
                raise ConfigError(
                    f"the saved run has {name}={then!r}, this one {name}={now!r}: the steps after "
                    f"{saved.step} would not continue it; set {name}={then!r}, or begin anew in "
                    "another checkpoint directory"
                )
        self.step, self.metrics, self.bounds = saved.step, saved.metrics, saved.bounds
        self.loaders = saved.loaders
        self.stopped, self.collects = saved.stopped, saved.collects
        self.handed, self.waiting, self.modes = saved.handed, saved.waiting, saved.modes or {}
        self.approximate = saved.approximate
