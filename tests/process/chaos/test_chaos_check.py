"""`holdfast chaos check`: readable verdicts, and what a plain job under torchrun with DCP loses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.tools.cli import main

STEPS, SAVE_EVERY, STRIKE_BEHIND = 12, 5, 6


def judged(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> dict[str, Any]:
    status = main(["chaos", *words, "--json"])
    verdict: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (0 if verdict["held"] else 1)
    return verdict


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_a_plain_job_repeats_steps_and_loses_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    found = judged(capsys, ["run", "plain-torchrun-dcp", "--out", str(out)])
    assert [(each["victim"], each["missed"]) for each in found["struck"]] == [("worker/1", False)]
    assert found["problems"] == [], found

    verdict = judged(capsys, ["check", str(out / "calm")])
    assert verdict["held"], verdict["violations"]
    assert (verdict["attempts"], verdict["steps"], verdict["undone"]) == (1, STEPS, 0)

    words = ["check", str(out / "history"), "--against", str(out / "calm"), "--undone-most", "0"]
    verdict = judged(capsys, words)
    broken = {each["check"]: each["message"] for each in verdict["violations"]}
    assert verdict["attempts"] > 1
    assert verdict["steps"] == STEPS
    assert verdict["undone"] >= STRIKE_BEHIND - SAVE_EVERY
    assert {"bounded loss", "samples once", "samples of the reference"} <= broken.keys()
    assert f"step {SAVE_EVERY} has 8 others and lacks 8" in broken["samples of the reference"]
    assert "state of the reference" in broken
    assert {"no step skipped", "one attempt at a time"} & broken.keys() == set()


def test_the_verdict_is_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"t": 1.0 + step, "kind": "step", "step": step, "rank": 0, "attempt": 0}
        for step in (0, 1, 3)
    ]
    file = tmp_path / "history-here-1-a.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["chaos", "check", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "✕ no step skipped" in shown
    assert "step 1 of attempt 0 is followed by step 3" in shown
    assert "✓ one attempt at a time" in shown
    assert "– samples once: not reported" in shown
    assert "3 steps survive, of 3 that were trained in 1 attempts" in shown
