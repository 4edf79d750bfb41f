"""NumPy arrays as tensors over the same memory: saved and restored like them, without a copy."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.state import torch_dtypes

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def tensor_of(path: str, array: Array, *, filled: bool) -> torch.Tensor:
    """Return a tensor over the memory of ``array``; ``filled``: a restore writes into it.

    Raises ``StateError`` for arrays that are more than a block of numbers, and for those that are
    to be filled and cannot be. An array that is only read may be copied.
    """
    if type(array) not in (np.ndarray, np.memmap):
        raise StateError(
            f"{path}: {type(array).__name__} is more than an array; track its parts as plain arrays"
        )
    plain = array.dtype.isnative and str(array.dtype) in torch_dtypes.BY_NAME
    if not plain:
        raise StateError(
            f"{path}: an array of dtype {array.dtype} cannot be captured; keep numbers of this "
            "machine's byte order in arrays, and text or objects in lists"
        )
    if array.flags.writeable and all(stride >= 0 for stride in array.strides):
        return torch.from_numpy(array)
    if filled:
        kind = "backwards" if array.flags.writeable else "read-only"
        raise StateError(f"{path}: a {kind} array cannot be restored in place; track a copy of it")
    return torch.from_numpy(array.copy())
