"""Removal of steps of a root by the rules of `holdfast prune`, for tests of what remains."""

from __future__ import annotations

from pathlib import Path

from holdfast.ckpt.checkpoints import catalog
from holdfast.ckpt.checkpoints.retention import remove_steps
from holdfast.ckpt.checkpoints.retention_rules import PruneCandidate, Rules, judge
from holdfast.ckpt.store.places import open_store


def prune(root: str | Path, *, keep_last: int) -> list[int]:
    """Remove all but the newest ``keep_last`` steps and the newest verified one; return them."""
    newest_verified = catalog.choose(root, None)
    store = open_store(root)
    candidates = [PruneCandidate(step=step) for step in catalog.committed(store)]
    verdicts = judge(candidates, Rules(keep_last=keep_last), newest_verified=newest_verified)
    going = [verdict.step for verdict in verdicts if not verdict.keep]
    remove_steps(store, going)
    return going


def remove(root: str | Path, step: int) -> None:
    """Remove one step."""
    remove_steps(open_store(root), [step])
