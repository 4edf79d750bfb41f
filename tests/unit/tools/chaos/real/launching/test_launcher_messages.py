"""The configuration of a launcher on its way into another process."""

from __future__ import annotations

from pathlib import Path

from holdfast.elastic.launch.config import APART_TIMING, LaunchConfig, NodeSpec
from holdfast.elastic.launch.joint import JointConfig
from holdfast.elastic.rendezvous.link import CoordinatorPlace
from holdfast.tools.chaos.real.launching.messages import (
    LaunchOrder,
    ManagedPart,
    decoded,
    encoded,
)


def test_a_configuration_arrives_as_it_was() -> None:
    config = LaunchConfig(
        command=("python", "train.py"),
        nodes=(NodeSpec(name="a", slots={"trainer": 2}), NodeSpec(name="b", slots={})),
        wanted={"trainer": 2},
        run_dir=Path("/runs/one"),
        absent=frozenset({"b"}),
        settings={"snapshots": {"parity": 2}},
        timing=APART_TIMING,
        agent_env={"A": "b"},
        return_s=60.0,
    )
    order = LaunchOrder(config=config)
    assert decoded(encoded(order)) == order
    assert decoded(encoded(order)).config.job == config.job
    joint = JointConfig(
        place=CoordinatorPlace.parse("managed://127.0.0.2"),
        key_file=Path("/keys/one"),
        least=3,
        most=3,
        number=1,
    )
    part = ManagedPart(joint=joint, program=Path("/usr/bin/etcd"))
    order = LaunchOrder(config=config, managed=part)
    assert decoded(encoded(order)) == order
