"""Bytes of microbatches: padded for the exchange, and as they were afterwards."""

from __future__ import annotations

from typing import Any

import torch
from adapter_packages import needs

pytestmark = needs("transformers", "accelerate", "safetensors")


class OneRank:
    """A run of one rank, whose last microbatch has no samples."""

    def reduce(self, values: list[int], how: str) -> int:
        assert how == "max"
        return max(values)

    def gather(self, rows: list[torch.Tensor], *, fill: float) -> torch.Tensor:
        assert {row.dtype for row in rows} == {torch.uint8}
        return torch.stack([*rows, torch.full_like(rows[0], fill)])


def test_every_microbatch_gets_its_bytes_back_and_one_without_samples_has_none() -> None:
    from holdfast.adapters.hf.grpo.exchange import of_all_microbatches

    run: Any = OneRank()
    assert of_all_microbatches(run, [b"{}", b'{"a": "b c"}', b"[]"]) == [
        *(b"{}", b'{"a": "b c"}', b"[]", b""),
    ]
