"""A test of my_loop.py under faults: `pytest test_my_loop.py`, where Holdfast is installed."""

from pathlib import Path

import pytest

LOOP = Path(__file__).with_name("my_loop.py")


@pytest.mark.chaos(nodes=3, parity=1)
def test_a_dead_worker_and_a_lost_machine_cost_no_sample_and_no_bit(cluster, nemesis, history):
    cluster.start(LOOP, "--steps", "30", "--step-s", "0.1")
    nemesis.at(step=10).kill("trainer", rank=1)
    nemesis.after("resumed").lose("b")
    history.check(against=cluster.undisturbed(), undone_most=5)
