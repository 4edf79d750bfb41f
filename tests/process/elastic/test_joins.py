"""Joins take place at the end of a step: training ranks are not interrupted within one."""

from __future__ import annotations

from pathlib import Path

from jobs import PRELOAD, hurt, launched
from tree import HELPERS

from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command

SCRIPT = HELPERS / "tiny_training.py"


def test_a_replacement_joins_at_the_end_of_a_step_which_all_begin_from(tmp_path: Path) -> None:
    late = tmp_path / "late"  # else the replacement may be ready before the other has left its step
    flags = ["--result", str(tmp_path / "result.json"), "--steps", "1000", "--pace", "0.8"]
    flags += ["--late", str(late)]
    config = LaunchConfig(
        command=python_command(SCRIPT, flags),
        nodes=tuple(NodeSpec(name=n, domain=n, slots={"trainer": 1}) for n in ("n0", "n1")),
        wanted={"trainer": 2},
        run_dir=tmp_path / "run",
        preload=PRELOAD,
    )
    with launched(config) as job:
        job.await_step(2)
        hurt(job.worker("trainer/1"))
        alone = job.world_of(1)
        late.touch()
        joined = job.world_of(2, after=job.history.index(alone))
        (halted,) = job.events("halted")
        assert halted["seat"] == "trainer/0"
        assert halted["generation"] == alone["generation"]
        assert halted["step"] == joined["restore_step"]
        steps = [e for e in job.events("step") if e["generation"] == alone["generation"]]
        assert steps[-1]["step"] == halted["step"]
        job.await_step(halted["step"] + 2)
