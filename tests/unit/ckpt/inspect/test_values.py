"""Every bit pattern of the types numpy lacks decodes to torch's number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.ckpt.geometry.element_types import DTYPES
from holdfast.ckpt.inspect.values import decode, widened
from holdfast.ckpt.state.torch_dtypes import BY_NAME

FLOAT8 = [name for name in DTYPES if name.startswith("float8")]


@pytest.mark.parametrize("name", FLOAT8)
def test_every_float8_is_the_number_torch_sees(name: str) -> None:
    stored = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(stored.copy()).view(BY_NAME[name]).float().numpy()
    np.testing.assert_array_equal(decode(stored, DTYPES[name]), wanted)


def test_every_bfloat16_is_the_number_torch_sees() -> None:
    stored = np.arange(1 << 16, dtype="<u2")
    wanted = torch.from_numpy(stored.view("<i2").copy()).view(torch.bfloat16).float().numpy()
    found = decode(stored, DTYPES["bfloat16"])
    np.testing.assert_array_equal(found.view("<u4"), wanted.view("<u4"))


def test_complex32_is_two_halves() -> None:
    halves = np.array([[1.5, -2.0], [0.25, np.inf]], dtype="<f2")
    found = decode(halves.view("<u4")[:, 0], DTYPES["complex32"])
    np.testing.assert_array_equal(found, np.array([1.5 - 2j, complex(0.25, np.inf)], dtype="<c8"))


def test_a_byte_of_float4_is_two_numbers_low_half_first() -> None:
    found = decode(np.array([[0x21, 0xF8]], dtype=np.uint8), DTYPES["float4_e2m1fn_x2"])
    np.testing.assert_array_equal(found, [[0.5, 1.0, -0.0, -6.0]])


@pytest.mark.parametrize("name", DTYPES)
def test_the_type_is_known_before_anything_is_decoded(name: str) -> None:
    stored = np.zeros((2, 2), dtype=DTYPES[name].numpy)
    assert decode(stored, DTYPES[name]).dtype == widened(DTYPES[name])
