"""A script in one process, and as a job that loses a worker: both are to have one result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forked_scripts import ran
from jobs import PATIENT, PRELOAD, hurt, launched

from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command


def alone_and_disturbed(
    script: Path, folder: Path, *, ranks: int, flags: Sequence[str] = (), in_job: Sequence[str] = ()
) -> tuple[Any, Any]:
    """Return the results of ``script`` alone, and of a job of ``ranks`` of which one is killed.

    The script writes its result to the file ``--result`` as JSON. In a job it does not come to its
    end before the file ``--until`` exists. ``in_job`` are flags for the job only.
    """
    alone, disturbed, until = (folder / name for name in ("alone.json", "job.json", "until"))
    words = [sys.executable, str(script), "--result", str(alone), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran(words, env=env, check=True)
    words = ["--result", str(disturbed), "--until", str(until), *flags, *in_job]
    names = [f"n{i}" for i in range(ranks)]
    config = LaunchConfig(
        command=python_command(script, words),
        nodes=tuple(NodeSpec(name=n, domain=n, slots={"trainer": 1}) for n in names),
        wanted={"trainer": ranks},
        run_dir=folder / "run",
        timing=PATIENT,
        preload=PRELOAD,
    )
    with launched(config) as job:
        job.await_step(4)
        hurt(job.worker("trainer/1"))
        job.await_event(lambda e: e["kind"] == "restored" and e["generation"] >= 2)
        until.touch()  # not after its first step: that of a restored step 4 waits for this
        outcome = job.finish()
        assert outcome.ok, outcome.message
    return json.loads(alone.read_text()), json.loads(disturbed.read_text())
