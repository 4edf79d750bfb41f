"""Slurm's environment, and the node lists in it."""

from __future__ import annotations

import pytest

from holdfast.elastic.channel.slurm import SlurmStep, expand
from holdfast.elastic.errors import ConfigError

STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
}


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("", []),
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-10],m", ["n08", "n09", "n10", "m"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2].cluster", ["n1.cluster", "n2.cluster"]),
    ],
)
def test_node_lists_are_expanded(listed: str, hosts: list[str]) -> None:
    assert list(expand(listed)) == hosts


@pytest.mark.parametrize("listed", ["n[1-2", "n[a-b]", "n[]", "n[0-99999999]"])
def test_a_list_that_is_none_is_refused_by_name(listed: str) -> None:
    with pytest.raises(ConfigError, match="node list"):
        list(expand(listed))


def test_a_task_knows_its_place() -> None:
    step = SlurmStep.of(STEP)
    assert step is not None
    assert (step.job, step.task, step.tasks, step.node) == ("123456", 3, 4, 1)
    assert step.hosts == ("gpu01", "gpu02")
    assert step.port == 23456


def test_a_batch_script_is_no_step() -> None:
    without = {name: value for name, value in STEP.items() if name != "SLURM_STEP_NUM_TASKS"}
    assert SlurmStep.of(without) is None


def test_a_number_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="SLURM_PROCID is 'x'"):
        SlurmStep.of({**STEP, "SLURM_PROCID": "x"})
