"""A collective between passes works on all ranks; one that some do not call is named soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import PATIENT, PRELOAD, launched
from msgspec.structs import replace
from tree import HELPERS

from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command

SCRIPT = HELPERS / "own_collective.py"


def config(folder: Path, who: str) -> LaunchConfig:
    return LaunchConfig(
        command=python_command(SCRIPT, [who]),
        nodes=tuple(NodeSpec(name=n, domain=n, slots={"trainer": 1}) for n in ("n0", "n1")),
        wanted={"trainer": 2},
        run_dir=folder / "run",
        timing=replace(PATIENT, min_hang_s=1.0),
        preload=PRELOAD,
        max_attempts=2,
    )


def place_of(text: str) -> str:
    lines = SCRIPT.read_text().splitlines()
    return f"own_collective.py:{next(n for n, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.parametrize(
    ("who", "call", "leaders", "others"),
    [
        pytest.param(
            "alone",
            "dist.barrier",
            "dist.barrier()",
            f"run.steps at {place_of('run.steps(')}",
            marks=pytest.mark.exhaustive,
        ),
        (
            "gather",
            "DTensor.full_tensor",
            "full_tensor()",
            f"run.microbatches at {place_of('in run.microbatches(')}",
        ),
    ],
)
def test_a_collective_of_one_rank_is_named_long_before_a_first_step_is_late(
    who: str, call: str, leaders: str, others: str, tmp_path: Path
) -> None:
    with launched(config(tmp_path, who)) as job:
        found = job.await_event(lambda e: e["kind"] == "detected" and e["what"] == "stall")
        assert f"in {call} at {place_of(leaders)}" in found["why"]
        assert "on all ranks alike, or on none" in found["why"]
        outcome = job.finish()
    assert not outcome.ok
    assert f"in {call} at {place_of(leaders)}" in outcome.message
    assert f"in {others}" in outcome.message
    assert "for the 2. time without a newly protected step" in outcome.message


def test_a_collective_of_all_ranks_is_not(tmp_path: Path) -> None:
    with launched(config(tmp_path, "all")) as job:
        assert job.finish().ok
