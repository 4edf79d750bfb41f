"""Faults of environment processes: struck ones are asked again elsewhere, and jobs end the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sidecar_group import wait_until
from tree import HELPERS

from holdfast.adapters.rl.environments.base import Action, Failed, Reply
from holdfast.adapters.rl.environments.process_settings import ProcessConfig
from holdfast.adapters.rl.environments.processes.calls import ProcessCalls
from holdfast.adapters.rl.environments.processes.pool import ProcessPool
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.tools.chaos.faults.environments import KINDS, EnvironmentInjector, of_workers
from holdfast.tools.chaos.faults.injector import MissedError, Victim
from holdfast.tools.chaos.library import FOLDER
from holdfast.tools.chaos.scenarios.scenario import StrikeTarget, When
from holdfast.tools.chaos.scenarios.strikes import Strike
from holdfast.tools.cli import main

SCENARIOS = sorted(path.stem for path in FOLDER.glob("environments-*.toml"))
CALLS = "calls-0"


@pytest.mark.parametrize(
    ("kind", "how", "why"),
    [
        ("environment-garbage", "hang", "it sent garbage"),
        ("environment-memory", "memory later", "more than the memory that there is"),
    ],
)
def test_a_struck_process_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: str, why: str
) -> None:
    monkeypatch.syspath_prepend(HELPERS)
    config = EnvironmentConfig(
        factory="wayward_environment:Wayward",
        settings={"folder": str(tmp_path)},
        attempts=1,
        processes=ProcessConfig(count=1, writable=(str(tmp_path),)),
    )
    pool = ProcessPool(config, seed=7, owner="chaos")
    calls = ProcessCalls(pool, config)
    calls.submit(Action(ordinal=0, sample=0, turn=0, text=how, ended=True))
    wait_until((tmp_path / CALLS).exists, "a call")
    ((seat, pid),) = of_workers({"rollout/0": os.getpid()})
    victim = Victim(name=f"environment {pid}", part="environment", pids=(pid,), seat=seat)
    strike = Strike(number=0, kind=kind, target=StrikeTarget(), when=When(step=1), pick=0.0)
    injector, site = EnvironmentInjector(), object()
    assert injector.strike(strike, victim, site) is None  # type: ignore[arg-type]
    (tmp_path / "go on").touch()
    found: list[Reply] = []

    def replied() -> bool:
        found.extend(reply for _, reply in calls.replies(0.1))
        return bool(found)

    wait_until(replied, "a reply")
    pool.close()
    assert isinstance(found[0], Failed)
    assert why in found[0].reason
    with pytest.raises(MissedError):
        injector.strike(strike, victim, site)  # type: ignore[arg-type]


def test_every_kind_of_fault_of_environments_has_a_scenario() -> None:
    text = "".join((FOLDER / f"{name}.toml").read_text() for name in SCENARIOS)
    assert len(SCENARIOS) == 4
    assert all(f'kind = "{kind}"' in text for kind in (*KINDS, "kill", "stop"))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_job_whose_environments_are_struck_ends_as_the_undisturbed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: str
) -> None:
    status = main(["chaos", "run", scenario, "--out", str(tmp_path / "out"), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == 0 and found["held"], found
    checked = set(found["verdict"]["checked"])
    assert {"samples of the reference", "state of the reference"} <= checked
    hit = [each for each in found["struck"] if not each["missed"]]
    assert len(hit) >= 2, found["struck"]
