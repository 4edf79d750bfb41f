"""The configuration of a launcher on its way into another process."""

from __future__ import annotations

from pathlib import Path

from holdfast.elastic.launch.config import APART_TIMING, LaunchConfig, NodeSpec
from holdfast.tools.chaos.real.launching.messages import decoded, encoded


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
    assert decoded(encoded(config)) == config
    assert decoded(encoded(config)).job == config.job
