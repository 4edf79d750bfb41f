"""Values as bytes for another process: equal types and bits, or a refusal that names the part."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.ckpt.errors import CorruptError, StateError
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.trees.packing import pack, unpack


def again(value: Any) -> Any:
    """Return the value as another process gets it; its bytes are the same there."""
    data = pack(value, "the result")
    found = unpack(data)
    assert pack(found, "the result") == data
    return found


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**80),
        2**64 - 1,
        -0.0,
        math.inf,
        1e-320,
        "ä\ud800\0",
        b"\0\xff",
        [],
        (),
        {},
        [1, [2.5, ("x", None)]],
        {"a": 1, 2: "b", None: (), "$tuple": [1], 0.5: b""},
    ],
)
def test_plain_values_are_equal(value: Any) -> None:
    found = again(value)
    assert found == value
    assert repr(found) == repr(value), "types, signs and the order of keys"


def test_not_a_number_and_numpys_numbers_keep_their_types() -> None:
    nan, small = again((math.nan, np.float32(0.1)))
    assert math.isnan(nan)
    assert type(small) is np.float32
    assert small == np.float32(0.1)


@pytest.mark.parametrize("name", torch_dtypes.BY_NAME)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (5, 4)])
def test_tensors_of_every_dtype_have_equal_bits(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape, dtype=torch_dtypes.BY_NAME[name])
    raw = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8)
    torch_dtypes.as_carrier(tensor).view(-1).view(torch.uint8).copy_(raw)
    _, found = again(["odd", tensor])
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(
        torch_dtypes.as_carrier(found).view(-1).view(torch.uint8),
        torch_dtypes.as_carrier(tensor).view(-1).view(torch.uint8),
    )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(8)[2:5],
    ],
)
def test_tensors_lie_in_memory_as_before(tensor: torch.Tensor) -> None:
    found = again(tensor)
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()


def test_tensors_whose_elements_share_memory_are_written_out() -> None:
    found = again(torch.tensor([1.0, 2.0]).expand(3, 2))
    assert found.tolist() == [[1.0, 2.0]] * 3
    assert found.is_contiguous()


def test_conjugates_and_negatives_are_resolved() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    found = again({"as it is": numbers, "conjugate": numbers.conj(), "sign": numbers.conj().imag})
    assert found["as it is"].tolist() == [1 + 2j, 3 - 4j]
    assert found["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert found["sign"].tolist() == [-2.0, 4.0]


def test_parameters_stay_parameters() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    found = again([nn.Parameter(torch.ones(2)), frozen, torch.ones(2, requires_grad=True)])
    assert [type(each) for each in found] == [nn.Parameter, nn.Parameter, torch.Tensor]
    assert [each.requires_grad for each in found] == [True, False, True]


def test_a_models_state_is_an_ordered_dict_with_tied_weights_and_versions() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    state = model.state_dict()
    found = again(state)
    assert type(found) is OrderedDict
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert found["0.weight"].data_ptr() == found["2.weight"].data_ptr()
    assert found._metadata == state._metadata  # type: ignore[attr-defined]


def test_arrays_stay_arrays() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1]
    found = again(array)
    assert type(found) is np.ndarray
    assert found.dtype == np.int16
    assert np.array_equal(found, array)


class Colour(IntEnum):
    RED = 1


class Pair(NamedTuple):
    first: int


class Scaled(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (nn.Linear(2, 2), "^the result is a Linear$"),
        ({"model": [1, nn.Linear(2, 2)]}, r"^the result\['model'\]\[1\] is a Linear$"),
        ((Pair(1),), r"^the result\[0\] is a Pair$"),
        ([Colour.RED], r"^the result\[0\] is a Colour$"),
        ({"n": Counter("ab")}, r"^the result\['n'\] is a Counter$"),
        (torch.ones(2).as_subclass(Scaled), "^the result is a Scaled$"),
        ({1, 2}, "^the result is a set$"),
        ({frozenset(): 1}, "^the result has a key of type frozenset$"),
        ([torch.ones(2).to_sparse()], r"^the result\[0\]: layout torch.sparse_coo .*dense"),
        (torch.ones(2, device="meta"), "^the result: not materialised"),
        (np.array(["text"]), "^the result: an array of dtype <U4"),
    ],
)
def test_what_would_come_back_as_something_else_is_named(value: Any, said: str) -> None:
    with pytest.raises(StateError, match=said):
        pack(value, "the result")


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateError, match="nested deeper than 64 levels"):
        pack(loop, "the result")


@pytest.mark.parametrize("length", [0, 7, 20, -1])
def test_bytes_that_are_cut_off_are_corrupt(length: int) -> None:
    with pytest.raises(CorruptError, match="no packed value"):
        unpack(pack(torch.ones(3), "the result")[:length])


def test_an_unknown_tag_is_corrupt() -> None:
    data = pack([], "the result")
    data[8:] = data[8:].replace(b"[]", b"{}", 1).replace(b"{}", b'{"$x": 1}', 1)
    data[0] = len(data) - 8
    with pytest.raises(CorruptError, match="unknown tag"):
        unpack(data)
