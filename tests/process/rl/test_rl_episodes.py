"""An RL job whose prompts are episodes of two turns, with real processes and real kills."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobs import hurt
from rl_jobs import DEADLINE_S, MAIN, alone, rl_job
from sidecar_group import wait_until
from tree import HELPERS

from holdfast.adapters.rl.config import RLConfig, WarmStart, preset, save_config
from holdfast.adapters.rl.environments.process_settings import ProcessConfig
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.tools.chaos.faults.environments import of_workers

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


@pytest.fixture(scope="module")
def importing() -> Iterator[None]:
    """Let jobs import the helpers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HELPERS)
        patch.setenv("PYTHONPATH", str(HELPERS), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, importing: None) -> dict[str, Any]:
    """The outcome of an undisturbed job, with its environment on threads."""
    place = tmp_path_factory.mktemp("alone")
    found = alone(place, config_in(place))
    assert found["ledger"]["ok"], found["ledger"]
    assert len(calls_in(place)) == len(set(calls_in(place))) == 96
    return found


def same(result: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Say whether a job ended as the undisturbed one did."""
    keys = ("final_hash", "reward", "heldout")
    return result["ledger"]["ok"] and all(result[key] == expected[key] for key in keys)


def test_killed_environment_processes_are_asked_again_for_what_was_not_recorded(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    config = config_in(tmp_path)
    assert config.environment is not None
    processes = ProcessConfig(count=6, memory="512MiB", writable=(str(tmp_path),))
    environment = msgspec.structs.replace(config.environment, processes=processes)
    save_config(msgspec.structs.replace(config, environment=environment), tmp_path / "config.json")
    (tmp_path / "gate").touch()
    words = ["--config", str(tmp_path / "config.json"), "--result", str(tmp_path / "result.json")]
    job = subprocess.Popen([*MAIN, *words], stderr=subprocess.PIPE, text=True)
    try:
        waiting: set[tuple[int, int]] = set()

        def all_wait() -> bool:
            assert job.poll() is None
            waiting.update((o, s) for _, o, s, turn in calls_in(tmp_path) if turn)
            return len(waiting) == 6

        wait_until(all_wait, "second turns in all processes")
        for _, pid in of_workers({"rollout/0": job.pid}):
            hurt(pid)
        (tmp_path / "gate").unlink()
        _, said = job.communicate(timeout=DEADLINE_S)
    finally:
        job.kill()
    assert job.returncode == 0, said
    assert same(json.loads((tmp_path / "result.json").read_bytes()), expected)
    calls = [call[1:] for call in calls_in(tmp_path)]
    assert len(calls) == 96 + 6
    assert {call for call in calls if calls.count(call) > 1} == {(o, s, 1) for o, s in waiting}


def test_a_worker_killed_within_a_call_loses_no_reply_that_was_recorded(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
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
    assert same(result, expected)
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
