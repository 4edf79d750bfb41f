"""Logged metrics: means over microbatches in index order, so they do not depend on world size."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping

import torch

from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.summing import Reducer


class Metrics:
    """Collects the values of `Run.log`; ``latest`` holds the final values of the step."""

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._parts: dict[str, dict[int, tuple[float | torch.Tensor, float]]] = {}
        self.latest: dict[str, float] = {}

    def add(
        self,
        microbatch: int | None,
        values: Mapping[str, float | torch.Tensor],
        *,
        counts: float = 1,
    ) -> None:
        """Add the values of a microbatch, or of the step if ``microbatch`` is None.

        A microbatch is weighted by what it ``counts``: its samples, as a rule. A stand-in has 0 and
        adds nothing. A tensor may change afterwards. Raises ``ConfigError`` for anything but
        numbers.
        """
        for name, value in values.items():
            kept = _number(name, value)
            if microbatch is None:
                self.latest[name] = float(kept)
            elif counts:
                self._parts.setdefault(name, {})[microbatch] = (kept, counts)

    def begin_pass(self) -> None:
        """Drop the values of an earlier pass that is repeated."""
        self._parts.clear()

    def signature(self) -> int:
        """Return a 32-bit number that is equal on ranks with the same names."""
        return zlib.crc32("\0".join(sorted(self._parts)).encode())

    def unite(self, gather: Callable[[Json], list[Json]]) -> None:
        """Take in the names of other ranks, where a metric has a value in some microbatches only.

        Collective; ``gather`` returns every rank's value.
        """
        for names in gather(list(self._parts)):
            for name in names if isinstance(names, list) else ():
                self._parts.setdefault(str(name), {})

    def end_pass(self, reducer: Reducer, *, speaks: bool = True) -> None:
        """Average the pass's values over the microbatches that have them; collective if there are.

        All ranks have the same names. Of the ranks that ran the same microbatches, one ``speaks``.
        """
        names = sorted(self._parts)
        if not names:
            return
        count = self._microbatches
        table = torch.zeros(len(names), 2 * count, dtype=torch.float64)
        for row, name in enumerate(names):
            for microbatch, (value, counts) in self._parts[name].items() if speaks else ():
                table[row, microbatch] = float(value) * counts
                table[row, count + microbatch] = counts
        reducer.sum_(table)
        for name, row in zip(names, table.tolist(), strict=True):
            if total := sum(row[count:]):
                self.latest[name] = sum(row[:count]) / total
        self._parts.clear()

    def clear(self) -> None:
        """Begin a new step."""
        self._parts.clear()
        self.latest = {}


def _number(name: str, value: object) -> float | torch.Tensor:
    """Return a value as it is now; tensors stay on their device."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().clone()
    what = f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        what = f"a {value.dtype} tensor of shape {list(value.shape)}"
    elif not isinstance(value, str):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)  # type: ignore[arg-type]
    raise ConfigError(
        f"run.log({name}=...) was given {what}: give a real number, or a tensor of one, such as "
        "the mean"
    )
