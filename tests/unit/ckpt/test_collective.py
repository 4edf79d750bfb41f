"""Ranks exchange through host memory where their group serves it, else through their device."""

from __future__ import annotations

import pytest

from holdfast.ckpt.collective import device_kind


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl,cpu:gloo", "cpu"),
        ("cuda:nccl", "cuda"),
        ("xpu:xccl", "xpu"),
        ("cpu:holdfast,cuda:holdfast", "cpu"),
    ],
)
def test_host_memory_is_exchanged_where_the_group_takes_it(config: str, kind: str) -> None:
    assert device_kind(config) == kind
