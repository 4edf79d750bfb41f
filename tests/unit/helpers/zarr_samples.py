"""Arrays of every storable dtype, with random bits."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.ckpt.geometry.element_types import DTYPES

Arrays = dict[str, tuple[npt.NDArray[Any], str]]


def of_every_dtype(shape: tuple[int, ...] = (7, 5), seed: int = 0) -> Arrays:
    """Return one array per dtype, as numpy's view of it: any bits, those of NaNs included."""
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for name, dtype in DTYPES.items():
        top = 2 if name == "bool" else 256
        raw = rng.integers(0, top, prod(shape) * dtype.itemsize, dtype=np.uint8)
        arrays[f"t.{name}"] = (raw.view(dtype.numpy).reshape(shape), name)
    return arrays
