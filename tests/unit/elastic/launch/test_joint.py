"""One of several launchers names its nodes and their failure domain."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.launch.joint import JointConfig, JointLauncher, SharedJobRecord
from holdfast.elastic.rendezvous.link import CoordinatorPlace


@pytest.mark.parametrize(
    ("told", "domains"),
    [(("", ""), ["machine3", "machine3"]), (("rack-1", "rack-2"), ["rack-1", "rack-2"])],
)
def test_a_nodes_domain_is_the_machine_unless_it_is_named(
    tmp_path: Path, told: tuple[str, str], domains: list[str]
) -> None:
    nodes = [NodeSpec(name=f"node{i}", domain=each, slots={}) for i, each in enumerate(told)]
    launcher = JointLauncher(
        LaunchConfig(command=("true",), nodes=tuple(nodes), wanted={}, run_dir=tmp_path),
        JointConfig(
            place=CoordinatorPlace.parse("localhost:1"),
            key_file=tmp_path / "key.json",
            host="127.0.0.1",
        ),
    )
    launcher._take(SharedJobRecord(run="r", machines=2, wanted={}), 3)
    assert [node.name for node in launcher.config.nodes] == ["node3-0", "node3-1"]
    assert [node.domain for node in launcher.config.nodes] == domains
