"""TensorBoard, MLflow and Weights & Biases have every step of a run once, whatever is killed."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import environments
import pytest
from document_blocks import blocks
from programs import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
SCRIPT = str(HERE / "tracked_job.py")
GUIDE = HERE.parents[1] / "docs" / "how-to" / "trackers.md"
STEPS = 12


def logs(run: Run, out: Path) -> list[list[Any]]:
    """Return what each tracker has: step, name, value."""
    found: list[list[Any]] = json.loads(run("python", SCRIPT, str(out), "--read").splitlines()[-1])
    return found


def check(found: list[list[Any]]) -> None:
    """Check that each tracker has all steps once, and that their values agree."""
    for log in found:
        for name in ("loss", "twice/loss"):
            assert [step for step, of, _ in log if of == name] == list(range(STEPS))
    for log in found[1:]:
        assert [value for _, _, value in log] == pytest.approx([v for _, _, v in found[0]])


@pytest.fixture(scope="module")
def quiet(trackers: Run, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Return the logs of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("quiet")
    trackers("python", SCRIPT, str(out))
    found = logs(trackers, out)
    check(found)
    return found


def test_a_killed_leader_repeats_no_step_and_takes_none_back(
    trackers: Run, quiet: list[list[Any]], tmp_path: Path
) -> None:
    launch = ("-m", "holdfast.tools.cli", "run", "--nproc", "2", SCRIPT, str(tmp_path))
    trackers("python", *launch, "--kill", "7", cwd=tmp_path)
    assert (tmp_path / "died").exists()
    assert logs(trackers, tmp_path) == quiet


def test_a_run_that_is_killed_whole_and_begun_again_goes_on_in_the_same_logs(
    trackers: Run, quiet: list[list[Any]], tmp_path: Path
) -> None:
    words = [str(environments.python("trackers")), SCRIPT, str(tmp_path)]
    env = environments.variables("trackers")
    killed = subprocess.run([*words, "--kill", "6"], env=env, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    trackers("python", SCRIPT, str(tmp_path))
    assert logs(trackers, tmp_path) == quiet
    assert len(list((tmp_path / "tensorboard").glob("*tfevents*"))) == 2


def test_the_guides_script_runs(trackers: Run, tmp_path: Path) -> None:
    (source,) = blocks(GUIDE, "python")
    (tmp_path / "first.py").write_text(source)
    trackers("python", str(tmp_path / "first.py"), cwd=tmp_path)
    runs = tmp_path / "runs" / "first"
    assert (runs / "mlflow.db").exists()
    assert list(runs.glob("tensorboard/*tfevents*"))
    assert list(runs.glob("wandb/wandb/offline-run-*/run-first.wandb"))
