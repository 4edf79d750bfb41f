"""A declared budget holds in real jobs: never more is taken, and too little is said at once."""

from __future__ import annotations

from pathlib import Path

from jobs import REMEMBERING, job

from ckpt.arena import arena_path

LARGEST = 1_000_000
STEPS = 40


def taken_bytes(directory: Path) -> int:
    """What a node's files take; those removed while they are counted count as they were."""
    total = 0
    for path in directory.glob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_a_growing_job_stays_within_its_budget(tmp_path: Path) -> None:
    budget, grow = 12 * LARGEST, LARGEST // STEPS
    flags = ("--steps", str(STEPS), "--bytes", "1000", "--grow", str(grow))
    with job(
        tmp_path,
        *flags,
        "--memory",
        str(budget),
        script=REMEMBERING,
        nodes=2,
        per_node=1,
    ) as running:
        directories = [arena_path(running.launcher.run, node) for node in ("n0", "n1")]
        peak, outcome = 0, None
        while outcome is None:
            peak = max(peak, *(taken_bytes(each) for each in directories))
            outcome = running.launcher.wait(0.001)
        assert outcome.ok, outcome.message
        assert 2 * LARGEST < peak <= budget


def test_a_budget_that_is_too_small_ends_the_job_with_one_clear_sentence(tmp_path: Path) -> None:
    with job(tmp_path, "--memory", "100000", script=REMEMBERING) as running:
        outcome = running.finish()
        assert not outcome.ok
        assert "100,000 bytes are declared for a node: declare more" in outcome.message
        assert len(running.events("proposed")) == 1
