"""The demo with vLLM kills one of two servers, and judges both jobs; without vLLM it is refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import StepDone, UserEvent
from holdfast.tools.cli import main
from holdfast.tools.vllm import demo
from holdfast.tools.vllm.demo import ServerKill, judge
from holdfast.tools.vllm.program import vllm_command, vllm_program, vllm_variables


def ready(seat: str, group: int) -> UserEvent:
    return UserEvent(name="engine_ready", seat=seat, fields={"url": "", "group": group})


def done(step: int) -> StepDone:
    return StepDone(step=step, rank=0, seconds=4.0)


def test_a_server_is_killed_in_the_middle_of_a_step_once_both_are_there() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as victim:
        kill = ServerKill(step=2, latest=4)
        kill.see(ready("rollout/1", victim.pid), now_s=0.0)
        kill.see(done(3), now_s=10.0)
        kill.tick(now_s=19.0)
        assert kill.killed == ""
        kill.see(ready("rollout/2", -1), now_s=20.0)
        kill.see(done(3), now_s=20.0)
        kill.tick(now_s=21.9)
        assert kill.killed == ""
        kill.tick(now_s=22.0)
        assert kill.killed == "rollout/1"
        assert victim.wait(60) == -signal.SIGKILL
    assert not kill.restarted
    kill.see(ready("rollout/1", os.getpid()), now_s=30.0)
    assert kill.restarted


def test_a_server_is_killed_at_the_latest_in_the_middle_of_the_job() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as victim:
        kill = ServerKill(step=2, latest=4)
        kill.see(ready("rollout/0", victim.pid), now_s=0.0)
        kill.see(done(4), now_s=10.0)
        kill.tick(now_s=12.0)
        assert victim.wait(60) == -signal.SIGKILL


def result(**changed: Any) -> dict[str, Any]:
    return {"final_hash": "a", "ledger": ledger(), "steps": 4, "moved": 3, **changed}


def ledger(**changed: Any) -> dict[str, Any]:
    trained = {"trained": 16, "ready": 0}
    return {"violations": [], "tokens_resampled": 0, "ordinals": trained, **changed}


@pytest.mark.parametrize(
    ("changed", "check", "why"),
    [
        ({"final_hash": "b"}, "exact", "a token differs"),
        ({"ledger": ledger(violations=["lost"])}, "ledger_ok", "hurt: .*lost"),
        ({"ledger": ledger(tokens_resampled=1)}, "ledger_ok", "hurt: .*tokens_resampled"),
        ({"ledger": ledger(ordinals={"ready": 16})}, "ledger_ok", "'ready': 16"),
        ({"steps": 1}, "ledger_ok", "1 of 4 steps"),
        ({"moved": 0}, "moved", "no server was killed in the middle"),
    ],
)
def test_each_check_can_fail(changed: dict[str, Any], check: str, why: str) -> None:
    held = judge(result(), result(), killed="rollout/0", steps=4, left=[])
    assert set(held.values()) == {""}
    found = judge(result(**changed), result(), killed="rollout/0", steps=4, left=[])
    assert {name for name, each in found.items() if each} == {check}
    assert re.search(why, found[check])


def test_without_vllm_demo_and_benchmark_are_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for words in (["demo", "--engine", "vllm"], ["bench", "rl", "--engine", "vllm"]):
        assert main(words) == 2
        assert "pip install vllm holdfast" in " ".join(capsys.readouterr().err.split())


def test_an_engine_is_for_the_section_of_reinforcement_learning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "plan", "--engine", "vllm"]) == 2
    assert "holdfast bench rl --engine vllm" in " ".join(capsys.readouterr().err.split())


def test_too_few_steps_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "vllm"
    program.touch(mode=0o755)
    assert vllm_program(str(tmp_path)) == str(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--steps 3 is too few"):
        demo.run(steps=3, seed=0, folder=tmp_path, keep=False, console=Console())


def test_a_server_reads_weights_at_its_place(tmp_path: Path) -> None:
    found = vllm_command("vllm", tmp_path, context=96, place={"checkpoints": "/w"})
    assert found[found.index("--port") + 1] == "{port}"
    assert found[-1] == '{"holdfast": {"checkpoints": "/w"}}'
    assert "TORCHDYNAMO_DISABLE" in vllm_variables(cuda=False, given={})
    assert "OMP_NUM_THREADS" not in vllm_variables(cuda=True, given={"OMP_NUM_THREADS": "4"})
