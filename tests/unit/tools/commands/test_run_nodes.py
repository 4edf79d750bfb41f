"""How one `holdfast run` of several finds the others, from options and environment."""

from __future__ import annotations

import argparse

import pytest

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.launch.joint import JointConfig
from holdfast.elastic.launch.local import EMBEDDED
from holdfast.tools.commands.run_machines import add_options, joint_config

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[5-6]",
}


def joint(*words: str, slurm: bool = False) -> JointConfig | None:
    parser = argparse.ArgumentParser()
    add_options(parser.add_argument)
    parser.add_argument("--coordinator", default=EMBEDDED)
    return joint_config(parser.parse_args(words), SLURM if slurm else {})


def found(*words: str, slurm: bool = False) -> JointConfig:
    config = joint(*words, slurm=slurm)
    assert config is not None
    return config


def test_one_command_alone_meets_nobody() -> None:
    assert joint() is None
    assert joint("--coordinator", "etcd://e") is None


def test_a_place_to_meet_is_needed_and_only_for_several() -> None:
    with pytest.raises(ConfigError, match="place to meet"):
        joint("--nnodes", "2")
    with pytest.raises(ConfigError, match="add --nnodes"):
        joint("--coordinator", "head:1")


def test_least_and_most_machines() -> None:
    config = found("--nnodes", "2:8", "--coordinator", "head:1")
    assert (config.least, config.most, config.number, config.joins) == (2, 8, None, False)
    assert found("--nnodes", "3", "--coordinator", "head:1").least == 3
    with pytest.raises(ConfigError, match="MIN:MAX"):
        joint("--nnodes", "x", "--coordinator", "head:1")
    with pytest.raises(ConfigError, match="MIN:MAX"):
        joint("--nnodes", "3:2", "--coordinator", "head:1")


def test_who_joins_never_serves_the_coordinator() -> None:
    config = found("--join", "localhost:1")
    assert config.joins
    assert config.place.bind() == ""
    served = found("--nnodes", "2", "--coordinator", "localhost:1")
    assert served.place.bind() == "tcp://127.0.0.1:1"
    second = found("--nnodes", "2", "--coordinator", "localhost:1", "--node-rank", "1")
    assert second.place.bind() == ""


def test_slurm_says_how_many_who_and_where() -> None:
    config = found(slurm=True)
    assert (config.job, config.least, config.most, config.number) == ("slurm-17", 2, 2, 1)
    assert config.place.address == "n5:20017"
    assert config.place.bind() == ""


def test_options_come_before_what_slurm_says() -> None:
    config = found("--nnodes", "1:2", "--coordinator", "etcd://e:2379", "--job", "j", slurm=True)
    assert (config.job, config.least, config.most) == ("j", 1, 2)
    assert config.place.url == "etcd://e:2379"
