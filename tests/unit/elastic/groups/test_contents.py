"""Digests of tensors by blocks."""

from __future__ import annotations

import torch
from doubles.quantised import Quantised

from holdfast.elastic.groups.contents import BLOCK_BYTES, digest


def test_a_digest_is_of_the_given_blocks_alone() -> None:
    tensor = torch.zeros(3 * BLOCK_BYTES // 4)
    first, last = digest(tensor, range(1)), digest(tensor, range(2, 3))
    tensor[-1] = 1.0
    assert digest(tensor, range(1)) == first
    assert digest(tensor, range(2, 3)) != last


def test_a_tensor_that_wraps_others_is_digested_by_its_parts() -> None:
    integers, scale = torch.zeros(6, 4, dtype=torch.int8), torch.ones(6)
    whole = Quantised(integers, scale, 32)
    before = digest(whole, range(1))
    scale[5] = 2.0
    assert digest(whole, range(1)) != before
