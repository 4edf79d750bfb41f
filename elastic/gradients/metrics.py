"""Logged metrics: means over microbatches in index order, so they do not depend on world size."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from holdfast.elastic.gradients.summing import Reducer


class Metrics:
    """Collects the values of `Run.log`; ``latest`` holds the final values of the step."""

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._parts: dict[str, dict[int, tuple[float | torch.Tensor, int]]] = {}
        self.latest: dict[str, float] = {}

    def add(
        self,
        microbatch: int | None,
        values: Mapping[str, float | torch.Tensor],
        *,
        samples: int = 1,
    ) -> None:
        """Add the values of a microbatch, or of the step if ``microbatch`` is None.

        A microbatch is weighted by its ``samples``; a stand-in has 0 and adds nothing.
        """
        for name, value in values.items():
            kept = value.detach() if isinstance(value, torch.Tensor) else value
            if microbatch is None:
                self.latest[name] = float(kept)
                continue
            part = self._parts.setdefault(name, {})
            if samples:
                part[microbatch] = kept, samples

    def begin_pass(self) -> None:
        """Drop the values of an earlier pass that is repeated."""
        self._parts.clear()

    def signature(self, backward: bool) -> int:
        """Return a 32-bit number that is equal on ranks that did the same."""
        names = "\0".join(sorted(self._parts))
        return zlib.crc32(f"{backward}\0{names}".encode())

    def end_pass(self, reducer: Reducer, *, speaks: bool = True) -> None:
        """Average the pass's values over all ranks' microbatches; collective if there are any.

        Of the ranks that ran the same microbatches, one ``speaks``.
        """
        names = sorted(self._parts)
        if not names:
            return
        table = torch.zeros(len(names), self._microbatches + 1, dtype=torch.float64)
        for row, name in enumerate(names):
            for microbatch, (value, samples) in self._parts[name].items() if speaks else ():
                table[row, microbatch] = float(value) * samples
                table[row, -1] += samples
        reducer.sum_(table)
        for name, row in zip(names, table.tolist(), strict=True):
            self.latest[name] = sum(row[:-1]) / row[-1]
        self._parts.clear()

    def clear(self) -> None:
        """Begin a new step."""
        self._parts.clear()
        self.latest = {}
