"""Snapshots that are left out: they are counted, and the user is told why."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.ckpt.snapshot.copy_program import Program
from holdfast.ckpt.snapshot.fixed_part import PieceKey
from holdfast.ckpt.snapshot.settings import SnapshotStats
from holdfast.ckpt.state.capture import FlatState
from holdfast.ckpt.state.local_boxes import mark_of

_log = logging.getLogger(__name__)


class Discards:
    """Counts the discarded snapshots of one rank in its ``stats``."""

    def __init__(self, stats: SnapshotStats) -> None:
        self._stats = stats

    def torn(self, fqn: str) -> str:
        """Return the reason to discard a snapshot during whose copy a tensor was written to."""
        self._stats.torn = fqn
        return (
            f"{fqn} was written to while it was copied; change the state only through the tracked "
            "optimizers, or call fence() before"
        )

    def changed(
        self, step: int, changed: Sequence[PieceKey], program: Program, flat: FlatState
    ) -> str:
        """Return the reason to discard a snapshot some of whose fixed pieces have ``changed``."""
        fixed = program.fixed
        assert fixed is not None
        unseen = [key for key in changed if mark_of(flat.tensors[key[0]]) == fixed.pieces[key].mark]
        names = sorted({fqn for fqn, _ in unseen or changed})
        self._stats.torn = names[0]
        if not unseen:
            return (
                f"{names[0]} was written to while the snapshot was checked; call fence() before a "
                "change by hand"
            )
        reason = (
            f"{names[0]} changed without a trace that torch could see ({len(names)} tensors in "
            "all): through .data, memory shared with numpy, a custom kernel or another process; "
            "from now on it is copied at every step"
        )
        _log.warning("step %d: %s", step, reason)
        return reason

    def note(self, step: int, reason: str) -> None:
        """Count a discarded snapshot and log it: the first one, and later ones ever more rarely."""
        stats = self._stats
        stats.discarded += 1
        stats.reason = reason
        if stats.discarded.bit_count() == 1:
            _log.warning(
                "snapshot of step %d discarded (%d so far): %s", step, stats.discarded, reason
            )
