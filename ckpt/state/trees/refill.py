"""Restored values put into the objects that the caller holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping, MutableSequence
from io import BytesIO
from typing import Any

import numpy as np
import torch

from holdfast.ckpt.state.local_boxes import local_of, overlaps_itself
from holdfast.ckpt.state.trees.per_rank import PerRank
from holdfast.ckpt.state.trees.stateful import stateful_of


def refill(live: Any, saved: Any) -> Any:
    """Bring ``live`` to the state ``saved``, in place as far as that can be; return the result.

    The result is ``live`` where it is a tensor or an array of the saved kind, an object with state,
    or a container that can change, and these keep what they hold in the same way. Elsewhere it is
    ``saved``.
    """
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return _refilled_tensor(live, saved)
    if isinstance(live, np.ndarray) and isinstance(saved, np.ndarray):
        if (live.dtype, live.shape) != (saved.dtype, saved.shape):
            return saved
        if live.ctypes.data != saved.ctypes.data:
            np.copyto(live, saved)
        return live
    if isinstance(live, PerRank):
        live.value = refill(live.value, saved)
        return live
    if (found := stateful_of(live)) is not None:
        found.load_state_dict(saved)
        return live
    if _refilled(live, saved):
        return live
    if isinstance(live, tuple) and isinstance(saved, tuple) and len(live) == len(saved):
        return tuple(map(refill, live, saved))
    return saved


def _refilled(live: Any, saved: Any) -> bool:
    """Refill a container that can change, if ``saved`` is of its kind; say whether it was."""
    if isinstance(live, MutableMapping) and isinstance(saved, Mapping):
        pairs = [(key, refill(live.get(key), item)) for key, item in saved.items()]
        live.clear()
        for key, item in pairs:  # not `update`, with which a Counter counts
            live[key] = item
    elif isinstance(live, set) and isinstance(saved, set):
        live.clear()
        live.update(saved)
    elif isinstance(live, deque) and isinstance(saved, deque) and live.maxlen == saved.maxlen:
        items = [refill(_at(live, i), item) for i, item in enumerate(saved)]
        live.clear()
        live.extend(items)
    elif isinstance(live, bytearray) and isinstance(saved, bytearray):
        live[:] = saved
    elif isinstance(live, BytesIO) and isinstance(saved, BytesIO):
        live.seek(0)
        live.truncate()
        live.write(saved.getvalue())
        live.seek(saved.tell())
    elif isinstance(live, MutableSequence) and isinstance(saved, list):
        live[:] = [refill(_at(live, i), item) for i, item in enumerate(saved)]
    else:
        return False
    return True


def _at(items: MutableSequence[Any], i: int) -> Any:
    return items[i] if i < len(items) else None


def _refilled_tensor(live: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    if live is saved:
        return live
    if (live.dtype, live.shape) != (saved.dtype, saved.shape):
        return saved
    if overlaps_itself(local_of(live)):
        return saved
    with torch.no_grad():
        live.copy_(saved)
    return live
