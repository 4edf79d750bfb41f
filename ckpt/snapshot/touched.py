"""The rows of tensors that a user says have changed since the last snapshot.

The other rows are not read. So that a wrong statement is found, some of them are, other ones at
each snapshot: within 64 of them all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.native.sums import Flags, Lengths
from holdfast.ckpt.state.local_boxes import Leaf, local_of

_log = logging.getLogger(__name__)

Rows: TypeAlias = "int | slice | Sequence[int] | torch.Tensor"
"""Rows of a tensor: one, a slice, several, or a tensor of numbers or of one flag for each row."""


def row_numbers(rows: Rows, count: int) -> Lengths:
    """Return which of ``count`` rows are meant. Raises ``StateError`` for rows that are not there.

    A slice may reach beyond the last row, as in Python.
    """
    if isinstance(rows, slice):
        return np.arange(count, dtype=np.int64)[rows]
    if isinstance(rows, torch.Tensor):
        if rows.dtype is torch.bool and rows.shape != (count,):
            raise StateError(
                f"touched() was given {list(rows.shape)} flags for a tensor of {count:,} rows; "
                "give one flag for each row, or the numbers of the rows"
            )
        rows = (rows.nonzero() if rows.dtype is torch.bool else rows).reshape(-1).tolist()
    try:
        found = np.array([rows] if isinstance(rows, int) else list(rows), dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise StateError(
            f"touched() cannot take {type(rows).__name__} for rows: {error}; give a number, a "
            "slice, a list of numbers or a tensor of them"
        ) from error
    wrong = found[(found < -count) | (found >= count)]
    if len(wrong):
        raise StateError(
            f"touched() names row {int(wrong[0])} of a tensor that has {count:,}; rows are counted "
            "along its first dimension"
        )
    return found % max(count, 1)


@dataclass(slots=True, eq=False)
class _NamedRows:
    """A tensor, and which of its rows were named."""

    tensor: torch.Tensor
    rows: Flags


@dataclass(slots=True, eq=False)
class TouchedRows:
    """The rows named since the last snapshot, by the address of their tensor."""

    _named: dict[int, _NamedRows] = field(default_factory=dict)
    _mistaken: set[str] = field(default_factory=set)

    def note(self, tensor: torch.Tensor, rows: Rows) -> None:
        """Note that rows of ``tensor`` have changed. Raises ``StateError``."""
        if type(tensor) is not torch.Tensor or tensor.ndim == 0 or not tensor.is_contiguous():
            kind = f"{type(tensor).__name__} of shape {list(getattr(tensor, 'shape', ()))}"
            raise StateError(
                f"touched() takes a contiguous tensor with rows, not {kind}; leave it out: then "
                "all of it is read"
            )
        named = self._named.get(tensor.data_ptr())
        if named is None or named.tensor.shape != tensor.shape:
            named = _NamedRows(tensor, np.zeros(tensor.shape[0], dtype=np.bool_))
            self._named[tensor.data_ptr()] = named
        named.rows[row_numbers(rows, tensor.shape[0])] = True

    def take(self, tensors: Mapping[str, Leaf], volatile: set[str]) -> dict[str, Flags]:
        """Return the named rows by FQN, and begin anew. Raises ``StateError`` for a foreign tensor.

        Rows may be named of tensors that the training loop changes by itself.
        """
        if not self._named:
            return {}
        named, self._named = self._named, {}
        found = {
            fqn: named[local_of(tensors[fqn]).data_ptr()].rows
            for fqn in volatile
            if local_of(tensors[fqn]).data_ptr() in named
        }
        here = {local_of(tensors[fqn]).data_ptr() for fqn in found}
        for address, each in named.items():
            if address not in here:
                raise StateError(
                    f"touched() named rows of a tensor of shape {list(each.tensor.shape)} that is "
                    "no tracked buffer or tensor of its own now: track it, name the very tensor "
                    "that is tracked, or leave the call out; parameters and the state of "
                    "optimizers need none"
                )
        return {fqn: rows for fqn, rows in found.items() if fqn not in self._mistaken}

    def mistaken(self, fqns: Sequence[str], *, step: int) -> None:
        """Take no notice any more of the rows named of these tensors: others had changed, too."""
        for fqn in set(fqns) - self._mistaken:
            self._mistaken.add(fqn)
            _log.warning(
                "step %d: rows of %s have changed that touched() did not name; earlier snapshots "
                "may lack those changes, and from now on all of it is read at every step: name "
                "every row that the loop writes, or leave the call out",
                step,
                fqn,
            )


def touched_bytes(rows: Flags, row_bytes: int, at: Lengths, nbytes: Lengths) -> Flags:
    """Return which ranges of a tensor's bytes have a byte of the rows; ranges are not empty."""
    before = np.concatenate([[0], np.cumsum(rows)])
    first, last = at // row_bytes, (at + nbytes - 1) // row_bytes
    found: Flags = before[np.minimum(last + 1, len(rows))] > before[first]
    return found
