"""Rendezvous of one `holdfast run` with others, from options and environment."""

from __future__ import annotations

import argparse

import pytest

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.launch.config import EMBEDDED
from holdfast.elastic.launch.joint import JointConfig
from holdfast.tools.commands.run_machines import add_options, domains, joint_config

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
    with pytest.raises(ConfigError, match="need a common coordinator"):
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


def named(*words: str, nodes: int = 2, **environment: str) -> tuple[str, ...]:
    parser = argparse.ArgumentParser()
    add_options(parser.add_argument)
    args = parser.parse_args(words)
    args.nodes = nodes
    return domains(args, environment)


def test_one_domain_is_that_of_all_nodes_and_several_are_theirs_in_order() -> None:
    assert named() == ("", "")
    assert named("--domain", "rack-1") == ("rack-1", "rack-1")
    assert named("--domain", "rack-1,row/2") == ("rack-1", "row/2")


def test_the_environment_names_domains_where_no_option_does() -> None:
    assert named(HOLDFAST_DOMAIN="rack-3") == ("rack-3", "rack-3")
    assert named("--domain", "rack-4", HOLDFAST_DOMAIN="rack-3") == ("rack-4", "rack-4")
    assert named(HOLDFAST_DOMAIN="") == ("", "")


def test_wrong_domains_are_refused_by_their_source() -> None:
    with pytest.raises(ConfigError, match=r"--domain a,b,c: 3 domains for 2 nodes"):
        named("--domain", "a,b,c")
    with pytest.raises(ConfigError, match=r"HOLDFAST_DOMAIN 'rack 1'"):
        named(HOLDFAST_DOMAIN="rack 1")
    with pytest.raises(ConfigError, match=r"--domain ''"):
        named("--domain", "a,")


def test_a_managed_etcd_is_for_three_machines_and_more() -> None:
    config = found("--nnodes", "3", "--coordinator", "managed://head")
    assert (config.place.url, config.place.may_host) == ("managed://head", None)
    second = found("--nnodes", "3", "--coordinator", "managed://head", "--node-rank", "1")
    assert second.place.may_host is False
    assert found("--join", "managed://head").joins
    with pytest.raises(ConfigError, match="fewer than three machines survives the loss of none"):
        joint("--nnodes", "2", "--coordinator", "managed://head")
    for place in ("managed", "managed://head"):
        with pytest.raises(ConfigError, match="add --nnodes, three or more"):
            joint("--coordinator", place)


def test_a_managed_etcd_begins_at_a_named_machine_or_at_slurms_first() -> None:
    with pytest.raises(ConfigError, match="no machine is named"):
        joint("--nnodes", "3", "--coordinator", "managed")
    config = found("--nnodes", "3", "--coordinator", "managed", slurm=True)
    assert (config.place.url, config.place.may_host) == ("managed://n5:20017", False)
