"""GradScaler and LBFGS: one decision for all ranks, equal bits at every world size, and a kill."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_scripts import ran
from jobs import hurt, launched, trainers
from tree import HELPERS

SCRIPT = HELPERS / "update_training.py"


def alone(folder: Path, *flags: str) -> Any:
    """Return the result of one process."""
    words = [sys.executable, str(SCRIPT), "--result", str(folder / "alone"), *flags]
    ran(words, check=True)
    return json.loads((folder / "alone.0").read_text())


def killed(folder: Path, *flags: str) -> list[Any]:
    """Return the results of three ranks, of which one is killed in step 5.

    At the end there are two, or three if the replacement came in time.
    """
    gate = folder / "gate"
    words = ["--result", str(folder / "job"), "--gate", str(gate), *flags]
    config = trainers(SCRIPT, words, nodes=3, run_dir=folder / "run")
    with launched(config) as job:
        job.await_step(5)
        hurt(job.worker("trainer/2"))
        job.await_event(lambda e: e["kind"] == "restored" and e["generation"] > 1)
        gate.touch()
        outcome = job.finish()
        assert outcome.ok, outcome.message
        restored: dict[int, set[int]] = {}
        for each in job.events("restored"):
            restored.setdefault(each["generation"], set()).add(each["step"])
        del restored[1]
        assert all(len(steps) == 1 and min(steps) > 0 for steps in restored.values()), restored
    return [json.loads(path.read_text()) for path in sorted(folder.glob("job.*"))]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("scaler",), marks=pytest.mark.exhaustive),
        ("scaler", "--fsdp"),
        ("lbfgs",),
    ],
    ids=" ".join,
)
def test_a_killed_job_ends_as_one_process_does(tmp_path: Path, flags: tuple[str, ...]) -> None:
    one = alone(tmp_path, "--way", *flags)
    found = killed(tmp_path, "--way", *flags)
    assert len(found) >= 2
    assert all(each == one for each in found)
    if "scaler" in flags:
        assert one["extra"]["scale"] == 2.0**11, "two skips, and one growth"
    else:
        assert one["extra"] > 9


def test_lbfgs_over_shards_is_refused_by_name(tmp_path: Path) -> None:
    words = ["--result", str(tmp_path / "alone"), "--way", "lbfgs", "--fsdp"]
    done = ran([sys.executable, SCRIPT, *words])
    assert done.returncode == 1
    assert (
        "run.minimize(optimizer): a parameter of shape (16, 8) is a DTensor, and LBFGS would "
        "compute with this rank's part as if it were the whole"
    ) in done.stderr
