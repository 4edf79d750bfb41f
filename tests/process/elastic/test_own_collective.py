"""A collective between passes works on all ranks; one that some do not call is named soon."""

from __future__ import annotations

from pathlib import Path

from jobs import PATIENT, launched
from msgspec.structs import replace
from tree import HELPERS

from holdfast.elastic.launch.local import LaunchConfig, NodeSpec, python_command

SCRIPT = HELPERS / "own_collective.py"


def config(folder: Path, who: str) -> LaunchConfig:
    return LaunchConfig(
        command=python_command(SCRIPT, [who]),
        nodes=tuple(NodeSpec(name=n, domain=n, slots={"trainer": 1}) for n in ("n0", "n1")),
        wanted={"trainer": 2},
        run_dir=folder / "run",
        timing=replace(PATIENT, min_hang_s=1.0),
        max_attempts=2,
    )


def test_a_collective_of_one_rank_is_named_long_before_a_first_step_is_late(tmp_path: Path) -> None:
    lines = SCRIPT.read_text().splitlines()
    call, steps = (
        next(number for number, line in enumerate(lines, 1) if text in line)
        for text in ("dist.barrier()", "run.steps(")
    )
    with launched(config(tmp_path, "alone")) as job:
        found = job.await_event(lambda e: e["kind"] == "detected" and e["what"] == "stall")
        assert f"in dist.barrier at own_collective.py:{call}" in found["why"]
        assert "on all ranks alike, or on none" in found["why"]
        outcome = job.finish()
    assert not outcome.ok
    assert f"in dist.barrier at own_collective.py:{call}" in outcome.message
    assert f"in run.steps at own_collective.py:{steps}" in outcome.message
    assert "for the 2. time without a newly protected step" in outcome.message


def test_a_collective_of_all_ranks_is_not(tmp_path: Path) -> None:
    with launched(config(tmp_path, "all")) as job:
        assert job.finish().ok
