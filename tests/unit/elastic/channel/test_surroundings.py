"""A process's surroundings, derived from its launcher's environment."""

from __future__ import annotations

import pytest

from holdfast.elastic.channel.surroundings import Surroundings, is_launched, surroundings
from holdfast.elastic.errors import ConfigError

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[5-7]",
}


def test_a_script_started_by_hand_is_alone() -> None:
    assert surroundings({}) == Surroundings(rank=0, size=1, master="")


def test_torchruns_agents_serve_the_store_and_take_their_workers_with_them() -> None:
    found = surroundings(TORCHRUN)
    assert found == Surroundings(rank=1, size=4, master="head:1234", served=True, tied=True)


def test_another_launcher_that_sets_rank_and_world_leaves_the_store_to_rank_0() -> None:
    found = surroundings({"RANK": "0", "WORLD_SIZE": "2"})
    assert found == Surroundings(rank=0, size=2, master="localhost:29500")


def test_slurm_meets_at_its_first_host() -> None:
    assert surroundings(SLURM) == Surroundings(rank=2, size=3, master="n5:20017")
    assert surroundings({**SLURM, "MASTER_PORT": "7"}).master == "n5:7"


def test_torchrun_inside_slurm_comes_first() -> None:
    assert surroundings({**SLURM, **TORCHRUN}).size == 4


@pytest.mark.parametrize("rank", ["4", "x", "-1"])
def test_a_rank_that_is_none_is_refused(rank: str) -> None:
    with pytest.raises(ConfigError, match="RANK"):
        surroundings({**TORCHRUN, "RANK": rank})


def test_a_script_belongs_to_the_sidecar_that_is_named() -> None:
    assert is_launched({"HOLDFAST_SIDECAR": "/file"})
    assert not is_launched({})
    assert not is_launched({"RANK": "0", "WORLD_SIZE": "1"})


def test_one_of_several_processes_without_a_sidecar_refuses_to_train_alone() -> None:
    with pytest.raises(ConfigError, match="holdfast sidecar start"):
        is_launched(TORCHRUN)
