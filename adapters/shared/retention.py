"""Removal of the steps before the newest few, by the rules of ``holdfast prune``."""

from __future__ import annotations

from holdfast.ckpt.checkpoints import pins
from holdfast.ckpt.checkpoints.catalog import choose, committed
from holdfast.ckpt.checkpoints.retention import remove_steps
from holdfast.ckpt.checkpoints.retention_rules import PruneCandidate, Rules, judge
from holdfast.ckpt.store.places import open_store


def keep_newest(root: str, keep_last: int, *, saved: int) -> list[int]:
    """Remove old steps, and return them: those before the newest ``keep_last`` up to ``saved``.

    Steps after ``saved``, of a run that went back to an earlier one, do not count, and stay. So do
    pinned steps, the newest that can be trusted, and directories that are not Holdfast's.
    """
    store = open_store(root)
    pinned = pins.load(store).pins
    candidates = [
        PruneCandidate(step=step, pinned=step in pinned)
        for step in committed(store)
        if step <= saved
    ]
    verdicts = judge(candidates, Rules(keep_last=keep_last), newest_verified=choose(root, None))
    going = [verdict.step for verdict in verdicts if not verdict.keep]
    remove_steps(store, going)
    return going
