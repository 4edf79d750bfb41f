"""Values of a rollout as JSON that returns them as they were: tuples, tensors, NaN and all.

A rollout function may return anything; a log keeps data only.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import numpy as np
import torch

from holdfast.ckpt.state import torch_dtypes
from holdfast.elastic import ConfigError

_MARK: Final = "\0kind"
"""Key of a JSON object that stands for another kind of value."""


def encode(value: Any, *, what: str) -> bytes:
    """Return ``value`` as JSON; raise ``ConfigError``, which calls it ``what``, for other kinds.

    Plain values, lists, tuples, dicts with text as keys, tensors and arrays of numbers are kept.
    """
    return json.dumps(_plain(value, what)).encode()


def decode(data: bytes) -> Any:
    """Return the value that was encoded."""
    return _value(json.loads(data))


def _plain(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item(), what)
    if isinstance(value, list):
        return [_plain(each, what) for each in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return {_MARK: "tuple", "items": [_plain(each, what) for each in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        found = {key: _plain(each, f"{what}[{key!r}]") for key, each in value.items()}
        return {_MARK: "dict", "items": found} if _MARK in value else found
    if isinstance(value, torch.Tensor) and value.dtype in torch_dtypes.NAME_OF:
        return {_MARK: "tensor", **_bytes_of(value.detach().cpu().contiguous())}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_MARK: "array", **_bytes_of(torch.from_numpy(np.ascontiguousarray(value)))}
    raise ConfigError(
        f"{what} is a {type(value).__name__}, which a log of completions cannot keep: return "
        "numbers, text, lists, dicts with text as keys, tensors or arrays of numbers"
    )


def _bytes_of(tensor: torch.Tensor) -> dict[str, Any]:
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": torch_dtypes.NAME_OF[tensor.dtype],
        "shape": list(tensor.shape),
        "data": base64.b85encode(data).decode(),
    }


def _value(found: Any) -> Any:
    if isinstance(found, list):
        return [_value(each) for each in found]
    if not isinstance(found, dict):
        return found
    kind = found.get(_MARK)
    if kind is None:
        return {key: _value(each) for key, each in found.items()}
    if kind == "tuple":
        return tuple(_value(each) for each in found["items"])
    if kind == "dict":
        return {key: _value(each) for key, each in found["items"].items()}
    tensor = _tensor(found)
    return tensor.numpy() if kind == "array" else tensor


def _tensor(found: dict[str, Any]) -> torch.Tensor:
    dtype = torch_dtypes.BY_NAME[found["dtype"]]
    data = bytearray(base64.b85decode(found["data"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(found["shape"])
