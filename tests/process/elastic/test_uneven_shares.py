"""A slow rank gets fewer microbatches: steps take less time, and the weights are equal."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

from forked_scripts import ran
from jobs import Event, Job, hurt, launched, trainers
from tree import HELPERS

from holdfast.elastic.data.sharing import LOOK_EVERY

SCRIPT = HELPERS / "uneven_training.py"
SLOW = "trainer/1"


def steps_of(running: Job, seat: str, *, generation: int) -> list[Event]:
    return [
        event
        for event in running.events("step")
        if event["seat"] == seat and event["generation"] == generation
    ]


def alone(directory: Path) -> Any:
    result = directory / "alone.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran([sys.executable, SCRIPT, "--result", result], env=env, check=True)
    return json.loads(result.read_text())


def test_a_slow_rank_gets_fewer_microbatches_and_no_bit_changes(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    config = trainers(
        SCRIPT, ["--result", str(result), "--slow", SLOW], slots=3, run_dir=tmp_path / "run"
    )
    with launched(config) as running:
        shared = running.await_event(lambda e: e["kind"] == "shares")
        assert shared["shares"][1] < min(shared["shares"][0], shared["shares"][2])
        running.await_step(LOOK_EVERY + 4)
        before = steps_of(running, SLOW, generation=1)[:LOOK_EVERY]
        after = steps_of(running, SLOW, generation=1)[LOOK_EVERY:]
        assert {e["microbatches"] for e in before} == {3}
        assert {e["microbatches"] for e in after} == {shared["shares"][1]}
        assert median(e["seconds"] for e in after) < 0.8 * median(e["seconds"] for e in before)

        hurt(running.worker("trainer/2"))
        smaller = running.world_of(2)
        assert "by measured speed" in smaller["reason"]
        assert running.finish().ok
        first = steps_of(running, SLOW, generation=smaller["generation"])[0]
        assert first["microbatches"] < 4, "the new generation begins with shares by speed"
    assert json.loads(result.read_text()) == alone(tmp_path)
