"""The choice of the pieces of a state that change in part: a replay buffer, a sparse table. Pure.

The checksums of two snapshots in a row tell which parts of a piece stayed the same. A piece is
*partly moving* while most of them do. To compare such a piece before it is copied costs less than
to copy it; any other piece would be read twice for nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from holdfast.ckpt.native.sums import Flags, Lengths, Sums

_ENOUGH: Final = 0.5
_TOO_LITTLE: Final = 0.25
_STREAK: Final = 2


class PartialChoice:
    """Observes the checksums of the parts of one rank's pieces.

    ``edges[i]`` is the first part of piece ``i``, with one more at the end. A piece with fewer than
    ``least_parts`` is never chosen. ``parts`` are the parts of the chosen pieces.
    """

    def __init__(self, edges: Lengths, *, least_parts: int) -> None:
        self._edges, self._counts = edges, np.diff(edges)
        self._large = self._counts >= least_parts
        self._before: Sums | None = None
        self._streak = np.zeros(len(self._counts), dtype=np.int64)
        self._chosen = np.zeros(len(self._counts), dtype=np.bool_)
        self.parts: Flags = np.zeros(int(edges[-1]), dtype=np.bool_)

    def observe(self, sums: Sums) -> None:
        """Note the checksums of a snapshot's parts."""
        before, self._before = self._before, sums.copy()
        if before is None or not self._large.any():
            return
        share = np.add.reduceat((sums == before).astype(np.int64), self._edges[:-1]) / self._counts
        self._streak = np.where(share >= _ENOUGH, self._streak + 1, 0)
        stay = self._chosen & (share >= _TOO_LITTLE)
        self._chosen = self._large & (stay | (self._streak >= _STREAK))
        self.parts = np.repeat(self._chosen, self._counts)
