"""Values of a step's microbatches, collected on every rank in the order of the microbatches.

The order belongs to the work and not to the ranks, so the result has equal bits at every world
size, however the microbatches are shared.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError

How: TypeAlias = Literal["sum", "mean", "max", "min"]

_WORD: Final = torch.int64
"""Dtype as which bytes travel: integers that are 0 on all ranks but one add up bit for bit."""


class Adder(Protocol):
    """The ranks that run other microbatches."""

    def sum_(self, tensor: torch.Tensor) -> None:
        """Add up the ranks' tensors, in place."""


STAND_IN: Final = -1
"""Number, in a list of the microbatches that a rank ran, of one whose value is dropped."""


class ByMicrobatch:
    """Collects one value of each microbatch.

    ``gather`` returns the values of one rank of every data-parallel group; ``peers`` add up tensors
    over the groups. Both are collective. ``ran`` are the numbers of the microbatches that this rank
    ran in a pass, in order, with `STAND_IN` for a stand-in; there is one value for each.
    """

    def __init__(
        self, microbatches: int, *, gather: Callable[[Json], list[Json]], peers: Adder
    ) -> None:
        self._microbatches, self._gather, self._peers = microbatches, gather, peers

    def tensors(
        self, values: Sequence[torch.Tensor], ran: Sequence[int], *, fill: float | None
    ) -> torch.Tensor:
        """Return ``[microbatches, ...]``: the values' bits, in the order of the microbatches."""
        rows, present = self._table("run.gather", values, ran)
        if len(present) < self._microbatches:
            absent = sorted(set(range(self._microbatches)) - set(present))
            if fill is None:
                raise ConfigError(
                    f"run.gather: microbatches {absent} of this step have no samples, as at the "
                    "end of an epoch: give run.gather(values, fill=0.0) and leave their rows out"
                )
            rows[absent] = torch.tensor(fill, dtype=rows.dtype, device=rows.device)
        return rows

    def reduced(self, values: Sequence[Any], ran: Sequence[int], *, how: How) -> Any:
        """Return the values of the microbatches that have samples, put together in their order."""
        if how not in _NUMBERS:
            raise ConfigError(
                f"run.reduce(values, {how!r}): give one of {', '.join(map(repr, _NUMBERS))}"
            )
        if any(isinstance(value, torch.Tensor) for value in values):
            rows, present = self._table("run.reduce", values, ran)
            return _reduced(rows[present], how)
        return _NUMBERS[how](self._numbers(values, ran))

    def _table(
        self, call: str, values: Sequence[torch.Tensor], ran: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Return a row for every microbatch, and the numbers of those that have samples."""
        _check_count(call, values, ran)
        if not all(isinstance(value, torch.Tensor) for value in values):
            raise ConfigError(f"{call}: the values are tensors and others: give one kind")
        if any(isinstance(value, DTensor) for value in values):
            raise ConfigError(f"{call}: a value is a DTensor: give its value.full_tensor()")
        kept = {m: value for m, value in zip(ran, values, strict=True) if m >= 0}
        kinds = {m: f"{v.dtype} {list(v.shape)}" for m, v in kept.items()}
        everywhere = self._merged({str(m): kind for m, kind in kinds.items()})
        present = sorted(everywhere)
        if len(set(everywhere.values())) > 1:
            first = everywhere[present[0]]
            other = next(m for m in present if everywhere[m] != first)
            raise ConfigError(
                f"{call}: the value of microbatch {present[0]} is {first}, that of {other} is "
                f"{everywhere[other]}: give equal shapes and dtypes"
            )
        like = next(iter(kept.values()), None)
        if like is None:
            like = _like(everywhere[present[0]], device=values[0].device)
        return self._rows(kept, like), present

    def _rows(self, kept: Mapping[int, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        size_bytes = like.numel() * like.element_size()
        words = math.ceil(size_bytes / _WORD.itemsize)
        table = torch.zeros(self._microbatches, words, dtype=_WORD, device=like.device)
        row_bytes = table.view(torch.uint8)
        for microbatch, value in kept.items():
            flat = value.detach().contiguous().reshape(-1)
            row_bytes[microbatch, :size_bytes] = flat.view(torch.uint8)
        self._peers.sum_(table)
        found = row_bytes[:, :size_bytes].contiguous().reshape(-1).view(like.dtype)
        return found.view(self._microbatches, *like.shape)

    def _numbers(self, values: Sequence[Any], ran: Sequence[int]) -> list[float]:
        _check_count("run.reduce", values, ran)
        texts: dict[str, Json] = {}
        for microbatch, value in zip(ran, values, strict=True):
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise ConfigError(
                    f"run.reduce: a value is {value!r}: give tensors or numbers, one kind only"
                )
            if microbatch >= 0:
                whole = str(int(value)) if isinstance(value, numbers.Integral) else ""
                texts[str(microbatch)] = whole or float(value).hex()
        everywhere = self._merged(texts)
        return [_number(everywhere[m]) for m in sorted(everywhere)]

    def _merged(self, own: Mapping[str, Json]) -> dict[int, str]:
        """Return the texts of all ranks' microbatches, by number. Raises if there are none."""
        found: dict[int, str] = {}
        for theirs in self._gather(dict(own)):
            if isinstance(theirs, dict):
                found.update({int(m): str(text) for m, text in theirs.items()})
        if not found:
            raise ConfigError("no microbatch of this step has samples")
        return found


def _check_count(call: str, values: Sequence[Any], ran: Sequence[int]) -> None:
    if len(values) != len(ran):
        raise ConfigError(
            f"{call}: {len(values)} values for the {len(ran)} microbatches that this rank "
            "ran in the last pass: append one value in every microbatch"
        )


def _like(kind: str, *, device: torch.device) -> torch.Tensor:
    """Return a tensor of a dtype and shape as ``"torch.float32 [2, 3]"`` tells them."""
    dtype, _, shape = kind.partition(" ")
    sizes = [int(size) for size in shape.strip("[]").split(",") if size.strip()]
    return torch.empty(sizes, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float.fromhex(text)


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


_NUMBERS: Final[Mapping[How, Callable[[list[float]], float]]] = {
    "sum": sum,
    "mean": _mean,
    "max": max,
    "min": min,
}


def _reduced(rows: torch.Tensor, how: How) -> torch.Tensor:
    """Put rows together one after the other, because a kernel may choose another order.

    Like torch's own sums, those of integers and truth values are int64, and those of 16 bits are
    computed in float32.
    """
    given = rows.dtype
    if how in ("sum", "mean"):
        is_real = given.is_floating_point or given.is_complex
        if how == "mean" and not is_real:
            raise ConfigError(f"run.reduce(values, 'mean'): {given} has no mean: give floats")
        rows = rows.to(torch.promote_types(given, torch.float32) if is_real else torch.int64)
        given = given if is_real else torch.int64
    total = rows[0].clone()
    for row in rows[1:]:
        if how == "max":
            total = torch.maximum(total, row)
        elif how == "min":
            total = torch.minimum(total, row)
        else:
            total += row
    return (total / len(rows) if how == "mean" else total).to(given)
