"""The example of the docs with separate samplers: kills on either side do not affect the result.

Tests of samplers that need no processes are in tests/unit/rl/test_rl_sampler.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from jobs import PRELOAD, Event, Job, launched
from tree import HELPERS, ROOT

from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command

EXAMPLES = ROOT / "docs" / "examples"
DYING = HELPERS / "dying_grpo.py"
STEPS, DIES_AT = 3, 41


@contextmanager
def sampler(tmp_path: Path, name: str, *, most: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """Start a sampler, which dies after so many tokens (0: never)."""
    (tmp_path / name).mkdir()
    words = ["--example", "own_samplers", "--meet", tmp_path / "meet", "--sampled", most]
    command = [sys.executable, DYING, "--count", tmp_path / name, *words]
    with subprocess.Popen([*map(str, command)]) as process:
        try:
            yield process
        finally:
            process.kill()


def patiently(job: Job, wanted: Callable[[Event], bool]) -> Event:
    """Wait as long as a process takes to start, and to sample, on a machine that does much else."""
    for _ in range(2):
        with suppress(AssertionError):
            return job.await_event(wanted)
    return job.await_event(wanted)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_of_a_sampler_and_of_the_loop_leave_no_trace(tmp_path: Path) -> None:
    alone, result = tmp_path / "alone.json", tmp_path / "result.json"
    words = [sys.executable, EXAMPLES / "wrap_grpo.py", "--steps", STEPS, "--result", alone]
    flags = ["--example", "own_samplers", "--count", tmp_path, "--trained", 2]
    flags += ["--directory", tmp_path / "meet", "--steps", STEPS, "--result", result]
    config = LaunchConfig(
        command=python_command(DYING, [*map(str, flags)]),
        nodes=tuple(NodeSpec(name=name, domain=name, slots={"trainer": 1}) for name in "ab"),
        wanted={"trainer": 2},
        run_dir=tmp_path / "run",
        preload=PRELOAD,
    )
    with launched(config) as job, sampler(tmp_path, "first", most=DIES_AT) as first:
        patiently(job, lambda e: e["kind"] == "reformed")
        recovered = patiently(job, lambda e: e["kind"] == "rollout_recovered")
        assert first.wait(timeout=60) == -signal.SIGKILL
        with (
            subprocess.Popen([*map(str, words)]) as undisturbed,
            sampler(tmp_path, "second") as second,
        ):
            patiently(job, lambda e: e["kind"] == "step" and e["step"] >= 1)
            patiently(job, lambda e: e["kind"] == "resumed" and e["generation"] >= 2)
            patiently(job, lambda e: e["kind"] == "step" and e["step"] >= STEPS)
            outcome = job.finish()
            assert outcome.ok, outcome.message
            assert second.wait(timeout=60) == 0, "it ends with the loop"
            assert undisturbed.wait(timeout=60) == 0
    expected, found = (json.loads(path.read_text()) for path in (alone, result))
    for key in ("final_hash", "reward", "ordinals"):
        assert found[key] == expected[key]
    assert found["violations"] == expected["violations"] == []
    assert recovered["worker"] == f"sampler/{first.pid}"
    assert recovered["tokens"] > 0, "what it was at work on came back from its log"
    sampled = [(tmp_path / name / "sampled").stat().st_size for name in ("first", "second")]
    assert sampled[0] == DIES_AT
    assert sum(sampled) == expected["tokens_sampled"], "no token was sampled twice"
    assert (tmp_path / "trained").stat().st_size == STEPS + 1, "one step was begun again"
