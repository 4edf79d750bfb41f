"""Values of rollouts: they come back from JSON as they were, or are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from adapter_packages import needs

pytestmark = needs("transformers", "accelerate", "safetensors")


def again(value: Any) -> Any:
    from holdfast.adapters.hf.grpo.values import decode, encode

    return decode(encode(value, what="it"))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, -2.5, True, "text \0", 1e-300, 0.1],
        {"ids": [[1, 2], []], "more": {"a": (1, (2.0,))}, "\0kind": "tuple"},
        (),
    ],
)
def test_plain_values_come_back(value: Any) -> None:
    assert again(value) == value
    assert type(again(value)) is type(value)


def test_numbers_that_json_lacks_come_back() -> None:
    found = again([math.nan, math.inf, -math.inf])
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3),
        torch.tensor([1.5, math.nan]).to(torch.bfloat16),
        torch.tensor(True),
        torch.zeros(0, 4),
    ],
)
def test_tensors_come_back_bit_for_bit(tensor: torch.Tensor) -> None:
    found = again({"t": tensor})["t"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.nan_to_num(), tensor.nan_to_num())


def test_arrays_and_their_numbers_come_back() -> None:
    found = again([np.arange(3, dtype=np.float32), np.float64(0.5)])
    assert isinstance(found[0], np.ndarray)
    assert (found[0].dtype, found[0].tolist(), found[1]) == (np.float32, [0, 1, 2], 0.5)


@pytest.mark.parametrize("value", [object(), {1: 2}, {1, 2}, b"bytes", np.array(["a"])])
def test_other_kinds_are_refused_by_name(value: Any) -> None:
    from holdfast.adapters.hf.grpo.values import encode
    from holdfast.elastic import ConfigError

    with pytest.raises(ConfigError, match=r"the result\['x'\] is a .* cannot keep: return numbers"):
        encode({"x": value}, what="the result")
