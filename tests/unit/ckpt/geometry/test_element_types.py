"""A fill value that stands for an integer view never passes for data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.ckpt.geometry.element_types import DTYPES
from holdfast.ckpt.state import torch_dtypes

VIEWED = [dtype for dtype in DTYPES.values() if not dtype.native and "float4" not in dtype.name]


@pytest.mark.parametrize("dtype", VIEWED, ids=lambda dtype: dtype.name)
def test_the_portable_fill_value_is_not_a_number(dtype) -> None:  # type: ignore[no-untyped-def]
    bits = torch.from_numpy(np.array([dtype.fill(portable=True)], dtype=dtype.numpy))
    found = bits.view(torch_dtypes.BY_NAME[dtype.name])
    found = torch.view_as_real(found) if found.is_complex() else found
    assert found.float().isnan().all()
