"""A job on Ray checks its values, and gives each node its command."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.adapters.ray import RayOptions
from holdfast.adapters.ray.job import NodeFacts, RayJob, run_words, threads_of_a_worker
from holdfast.adapters.ray.placing import actor_options
from holdfast.elastic import ConfigError
from holdfast.tools.cli import build_parser, load
from holdfast.tools.commands.run_machines import joint_config

FACTS = NodeFacts(
    job="ray-1",
    node="cafe01",
    host="10.0.0.7",
    key_file="/own/key.json",
    notice_file="/own/notice",
    run_dir="/own/run",
)


def job(**changes: Any) -> RayJob:
    given: dict[str, Any] = {"nodes": (2, 8), "nproc": 8, "resources": {"CPU": 16, "GPU": 8}}
    given |= {"options": RayOptions()} | changes
    return RayJob.of("train.py", ["--epochs", "3"], **given)


def test_holdfast_run_understands_the_command_of_a_node() -> None:
    options = RayOptions(
        roles={"rollout": 2}, grace_s=40, wait_s=90, run_options=["--preload", "torch"]
    )
    words = ("run", *run_words(job(options=options), "10.0.0.1:4000", FACTS))
    args = build_parser("run", load("run")).parse_args(words)
    joint = joint_config(args, {})
    assert joint is not None
    assert (joint.least, joint.most, joint.joins, joint.host) == (2, 8, True, "10.0.0.7")
    assert joint.place.url == "tcp://10.0.0.1:4000"
    assert joint.key == "jobs/ray-1/record"
    assert (args.nproc, args.role, args.grace_s, joint.join_s) == (8, [("rollout", 2)], 40, 90)
    assert (args.domain, args.notice_file, args.preload) == ("cafe01", "/own/notice", "torch")
    assert (args.script, args.args) == ("train.py", ["--epochs", "3"])


def test_a_module_is_run_as_one() -> None:
    words = run_words(job(options=RayOptions(module=True)), "10.0.0.1:4000", FACTS)
    args = build_parser("run", load("run")).parse_args(["run", *words])
    assert args.module
    assert args.script == "train.py"


def test_a_node_has_a_cpu_for_each_trainer_unless_something_else_is_said() -> None:
    assert job(resources=None).resources == {"CPU": 8.0}
    assert job(nodes=3, resources=None).least == job(nodes=3).most == 3
    assert job(options=RayOptions(roles={"rollout": 2})).wanted == {"trainer": 64, "rollout": 2}


def test_an_actor_has_all_of_its_bundle() -> None:
    resources = {"CPU": 16.0, "GPU": 8.0, "memory": 1e9, "fast-disk": 1.0}
    assert actor_options(resources) == {
        "num_cpus": 16.0,
        "num_gpus": 8.0,
        "memory": 1e9,
        "resources": {"fast-disk": 1.0},
    }
    assert actor_options({"TPU": 4.0}) == {"num_cpus": 0, "resources": {"TPU": 4.0}}


@pytest.mark.parametrize(
    ("given", "cpus", "workers", "expected"),
    [("16", 16.0, 8, "2"), ("", 16.0, 8, "2"), ("3", 16.0, 8, "3"), ("1", 1.0, 4, "1")],
)
def test_the_workers_of_a_node_share_its_cpus(
    given: str, cpus: float, workers: int, expected: str
) -> None:
    assert threads_of_a_worker(given, cpus, workers) == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": (3, 2)}, r"nodes=\(3, 2\): give the least"),
        ({"nodes": 0}, r"nodes=\(0, 0\)"),
        ({"nodes": (1, 2, 3)}, r"nodes=\(1, 2, 3\): give a number, or \(least, most\)"),
        ({"nproc": 0}, "nproc=0"),
        ({"resources": {}}, "give an amount above 0"),
        ({"resources": {"GPU": 0}}, "give an amount above 0"),
        ({"resources": {"object_store_memory": 5}}, "give 'memory'"),
    ],
)
def test_a_wrong_job_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        job(**changes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"address": "ray://head:10001"}, "ray job submit"),
        ({"coordinator": "managed://head"}, "give the etcd:// address"),
        ({"coordinator": "head:29400"}, "give etcd://HOST:PORT"),
        ({"run_dir": "runs"}, "an absolute path"),
        ({"wait_s": 0}, "wait_s=0"),
        ({"grace_s": -1}, "grace_s=-1"),
        ({"roles": {"trainer": 1}}, "other than 'trainer'"),
        ({"roles": {"rollout": 0}}, "roles="),
        ({"settings": {"snapshots": {"parity": -1}}}, "parity"),
        ({"settings": {"imagined": 1}}, "imagined"),
        ({"run_options": "--quiet"}, "give a list of words"),
        ({"run_options": ["--parity=2"]}, r"use RayOptions\(settings\)"),
        ({"run_options": ["--par", "2"]}, r"use RayOptions\(settings\)"),
        ({"run_options": ["--nnodes", "3"]}, "use nodes instead"),
        ({"run_options": ["-mtrain"]}, r"use RayOptions\(module\)"),
        ({"run_options": ["--key-file", "k"]}, "leave --key-file out"),
        ({"run_options": ["--node-rank", "0"]}, "leave --node-rank out"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RayOptions(**options)


def test_words_alone_are_no_list_of_arguments() -> None:
    with pytest.raises(ConfigError, match="args='--epochs 3'"):
        RayJob.of("train.py", "--epochs 3", nodes=1, nproc=1, resources=None, options=RayOptions())
