"""An RL job whose prompts are episodes of two turns, with real processes and real kills."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from jobs import hurt
from rl_jobs import DEADLINE_S, MAIN, alone, rl_job
from sidecar_group import wait_until
from tree import HELPERS

from holdfast.adapters.rl.config import RLConfig, WarmStart, preset, save_config
from holdfast.adapters.rl.environments.registry import EnvironmentConfig

Call = tuple[int, int, int, int]
"""(process, ordinal, sample, turn)"""


def config_in(directory: Path) -> RLConfig:
    """Return a short job of episodes that tells its calls in ``directory``.

    A worker may have a third of them at work, so that none is left without any by a faster one.
    """
    files = {"calls": str(directory / "calls"), "gate": str(directory / "gate")}
    tiny = preset("tiny")
    return msgspec.structs.replace(
        tiny,
        environment=EnvironmentConfig(
            factory="recording_environment:RecordingTurns",
            settings=files,
            threads=16,
            waiting=8,
            limit_s=DEADLINE_S,
        ),
        model=msgspec.structs.replace(tiny.model, context=32),
        warm=WarmStart(steps=0),
        steps=3,
        evaluate_every=3,
        held_out=4,
        log_every_ticks=1,
    )


def calls_in(directory: Path) -> list[Call]:
    """Return the calls so far, each as it began."""
    path = directory / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(a), int(b), int(c), int(d)) for a, b, c, d in map(str.split, lines)]


def test_a_worker_killed_within_a_call_loses_no_reply_that_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(HELPERS)
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    (tmp_path / "alone").mkdir()
    expected = alone(tmp_path / "alone", config_in(tmp_path / "alone"))
    assert expected["ledger"]["ok"], expected["ledger"]
    assert len(calls_in(tmp_path / "alone")) == len(set(calls_in(tmp_path / "alone"))) == 96

    (tmp_path / "gate").touch()
    with rl_job(tmp_path, config_in(tmp_path)) as job:
        episodes: set[tuple[int, int]] = set()
        job.await_event(lambda e: e["kind"] == "sampling" and e["seat"] == "rollout/0")
        dead = job.worker("rollout/0")

        def holds_some() -> bool:
            episodes.update(
                (o, s) for pid, o, s, turn in calls_in(tmp_path) if turn and pid == dead
            )
            return len(episodes) >= 4

        wait_until(holds_some, "second turns under way in one worker")
        hurt(dead)
        found = job.await_event(
            lambda e: e["kind"] == "rollout_recovered" and e["worker"] == "rollout/0"
        )
        assert found["tokens"] > 0
        (tmp_path / "gate").unlink()
        outcome = job.finish()
        assert outcome.ok, outcome.message
        figures = job.events("episodes")
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert result["final_hash"] == expected["final_hash"]
    assert result["reward"] == expected["reward"]
    assert result["heldout"] == expected["heldout"]
    assert result["ledger"]["ok"], result["ledger"]
    calls = calls_in(tmp_path)
    for ordinal, sample in episodes:
        turns = [turn for _, o, s, turn in calls if (o, s) == (ordinal, sample)]
        assert sorted(turns) == [0, 1, 1], "the reply that was there is used, the other asked for"
    assert [event["turns_mean"] for event in figures] == [2.0] * 3
    assert all(event["cut_short"] == 0 < event["observed_tokens"] for event in figures)


def test_a_fault_in_an_environment_ends_the_job_alone_as_well(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(
        "from holdfast.adapters.rl.environments.base import HELD_OUT, Observation\n"
        "class Faulty:\n"
        "    def __init__(self, seed): pass\n"
        "    def prompt(self, ordinal): return 'a>'\n"
        "    def respond(self, action):\n"
        "        return Observation(reward=1.0 / (action.ordinal >= HELD_OUT))\n"
    )
    config = msgspec.structs.replace(
        preset("tiny"),
        environment=EnvironmentConfig(factory="faulty:Faulty"),
        warm=WarmStart(steps=0),
    )
    save_config(config, tmp_path / "config.json")
    done = subprocess.run(
        [*MAIN, "--config", "config.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(r"Faulty.respond for turn 0 of sample .*: ZeroDivisionError", done.stderr)
