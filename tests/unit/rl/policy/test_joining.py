"""Runs that train one policy each have the same settings, but for those that are a run's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from doubles.memory_store import MemoryStore

from holdfast.adapters.rl import main as job
from holdfast.adapters.rl.balance.settings import BalanceConfig
from holdfast.adapters.rl.config import RLConfig, preset, save_config
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.ledger.plan import Mode
from holdfast.adapters.rl.ledger.replay import ReplayConfig
from holdfast.adapters.rl.policy.joining import require_same_settings
from holdfast.adapters.rl.policy.settings import PolicyConfig
from holdfast.elastic.errors import ConfigError

TEAM = msgspec.structs.replace(
    preset("tiny"),
    environment=EnvironmentConfig(factory="reviewed"),
    policies={
        "old": PolicyConfig(frozen=True),
        "solver": PolicyConfig(),
        "critic": PolicyConfig(lr=0.5, tp=2, min_dp=3),
    },
    join="/meet",
    policy="critic",
)


def changed(**changes: Any) -> RLConfig:
    return msgspec.structs.replace(TEAM, **changes)


def test_a_run_trains_its_policy_and_knows_those_of_the_others() -> None:
    assert TEAM.trained == ("solver", "critic")
    assert (TEAM.elsewhere, [*TEAM.here], TEAM.leads) == ({"solver"}, ["critic"], False)
    assert changed(policy="solver").leads
    assert TEAM.here["critic"].lr == 0.5


def test_a_policy_has_a_mesh_and_checkpoints_of_its_own() -> None:
    assert (TEAM.here["critic"].tp, TEAM.here["critic"].min_dp) == (2, 3)
    assert changed(policy="solver").here["solver"].tp == TEAM.tp
    assert (TEAM.root, changed(checkpoint="s3://b/runs/").root) == (None, "s3://b/runs/critic")
    assert changed(join=None, policy="", checkpoint="root", policies={}).root == "root"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"join": "s3://bucket/meet"}, "give a directory that all runs see"),
        ({"policy": "old"}, r"policy is 'old', needed: one that is trained, of \['solver'"),
        ({"policies": {}}, "1 of the policies are trained, needed: at least 2"),
        ({"mode": Mode.BOUNDED}, "join with mode 'bounded'"),
        ({"replay": ReplayConfig(policy="recent", share=0.5)}, "join with replay"),
        ({"disk": "/disk"}, "join with disk"),
        ({"balance": BalanceConfig()}, "join with balance"),
        ({"join": None}, "policy is 'critic' without join"),
        ({"join": None, "policy": ""}, "critic has a tp or a min_dp of its own: without join"),
    ],
)
def test_what_such_runs_cannot_have_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        changed(**changes)


def test_settings_of_a_runs_own_may_differ_and_all_others_are_named() -> None:
    store = MemoryStore()
    for policy in ("solver", "critic"):
        own = changed(policy=policy, checkpoint=policy, slots=4 + len(policy), warm_start=policy)
        require_same_settings(store, msgspec.to_builtins(own))
    other = changed(lr=0.25, groups=8)
    with pytest.raises(ConfigError, match="have other settings: groups, lr; start all runs"):
        require_same_settings(store, msgspec.to_builtins(other))


def test_damaged_settings_are_named() -> None:
    store = MemoryStore()
    store.write("settings.json", [b"["])
    with pytest.raises(ConfigError, match=r"settings\.json: no settings"):
        require_same_settings(store, msgspec.to_builtins(TEAM))


def options(path: Path, config: RLConfig, *, policy: str = "") -> Any:
    save_config(config, path)
    return SimpleNamespace(config=path, policy=policy, warm_up=False, balance=False)


def test_the_command_says_which_policy_a_run_trains(tmp_path: Path) -> None:
    given = options(tmp_path / "config.json", changed(policy=""), policy="solver")
    assert job._config(given, {}).leads
    given.policy = "nobody"
    with pytest.raises(ConfigError, match="policy is 'nobody', needed: one that is trained"):
        job._config(given, {})
    given.policy = ""
    with pytest.raises(ConfigError, match=r"give --policy.*: one of solver, critic"):
        job._config(given, {})


def test_a_launcher_that_spills_to_disks_is_refused(tmp_path: Path) -> None:
    given = options(tmp_path / "config.json", TEAM)
    with pytest.raises(ConfigError, match="join with disk"):
        job._config(given, {"snapshots": {"disk": "/disk"}})


def test_rollout_workers_beside_another_run_than_the_lead_are_refused() -> None:
    channel: Any = SimpleNamespace()
    with pytest.raises(ConfigError, match="rollout workers belong to the run of solver"):
        job._roll_out(channel, TEAM)
