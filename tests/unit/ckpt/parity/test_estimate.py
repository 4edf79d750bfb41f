"""The public estimate of memory: plain numbers in, the arithmetic of the budget behind it."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.ckpt.errors import ArgumentError

GIB = 1 << 30


def shares(**job: int | str) -> tuple[float, float]:
    found = holdfast.memory_need(GIB, **job)
    return round(found.slots / GIB, 2), round(found.parity / GIB, 2)


def test_parity_costs_m_of_the_rest_of_the_group() -> None:
    assert shares(nodes=2) == (2, 2)
    assert shares(nodes=4) == (2, 0.67)
    assert shares(nodes=8) == (2, 0.29)
    assert shares(nodes=8, parity=2) == (2, 0.67)
    assert shares(nodes=8, parity="replicate") == (2, 2)


def test_a_step_more_may_be_lent_slots_and_parity() -> None:
    found = holdfast.memory_need(GIB, nodes=8)
    assert round(found.total / GIB, 2) == 2.29
    assert round(found.lent / GIB, 2) == 1.14


def test_many_nodes_form_groups_of_the_preferred_size() -> None:
    assert shares(nodes=64) == shares(nodes=8)
    assert shares(nodes=64, group=4) == shares(nodes=4)


def test_ranks_and_kept_steps_multiply_the_need() -> None:
    assert shares(nodes=4, ranks_per_node=2) == (4, 1.33)
    assert shares(nodes=4, keep=2) == (3, 1)
    assert shares(nodes=1, parity=0) == (2, 0)


def test_what_never_changes_is_there_once_and_has_one_parity() -> None:
    assert shares(nodes=8, fixed_bytes=GIB // 2) == (1.5, 0.21)
    assert shares(nodes=8, keep=3, fixed_bytes=GIB // 2) == (2.5, 0.36)
    found = holdfast.memory_need(GIB, nodes=8, fixed_bytes=GIB - (1 << 20))
    assert found.total < 1.16 * GIB
    assert found.lent < GIB // 100


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"nodes": 0}, "nodes=0"),
        ({"nodes": 2, "parity": 2}, "give 3 or more nodes, or less parity"),
        ({"nodes": 1, "parity": "replicate"}, "give 2 or more nodes"),
        ({"nodes": 2.0}, r"memory_need\(nodes=2.0\): give 1 or more nodes"),
        ({"nodes": 2, "parity": True}, "parity=True"),
        ({"nodes": 2, "parity": "mirror"}, "or 'replicate'"),
        ({"nodes": 2, "group": 1}, "group=1"),
        ({"nodes": 2, "keep": 0}, "keep=0"),
        ({"nodes": 2, "fixed_bytes": -1}, "fixed_bytes=-1"),
        ({"nodes": 2, "fixed_bytes": 2 * GIB}, "give as many or fewer"),
    ],
)
def test_a_job_that_cannot_be_is_refused(job: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        holdfast.memory_need(GIB, **job)
