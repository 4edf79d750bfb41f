"""Digests of a script's values: nested inputs, random generators, tensors of the state."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final, Literal, cast

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.flatten import FlatState, flatten
from holdfast.ckpt.state.local_boxes import local_of
from holdfast.ckpt.types import Json
from holdfast.elastic.loop.trace.records import LeafDigest

_BYTES: Final = 8
_DEPTH: Final = 16
_SHORT: Final = 60

Kind = Literal["parameter", "buffer", "shard", "value", "own"]


def digest_of(value: Any) -> str:
    """Return a digest of a value: tensors and arrays by their bits, containers by their items.

    The order of names in a mapping does not count.

    Of an object it takes ``state_dict()`` if there is one, else the attributes; what has neither
    counts by its type.
    """
    made = hashlib.blake2b(digest_size=_BYTES)
    for piece in _pieces(value, _DEPTH):
        made.update(piece)
    return made.hexdigest()


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    if depth == 0:
        return
    if isinstance(value, torch.Tensor):
        yield from _tensor_pieces(value)
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype} {value.shape}".encode()
        if value.dtype != object:
            yield np.ascontiguousarray(value).tobytes()
        else:
            yield from _items(value.ravel().tolist(), depth)
    elif value is None or isinstance(value, bool | int | float | complex | str | np.generic):
        yield f"{type(value).__name__} {value!r}".encode()
    elif isinstance(value, bytes | bytearray):
        yield b"bytes "
        yield bytes(value)
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        names = all(isinstance(key, str) for key in value)  # a checkpoint sorts them
        for key, item in sorted(value.items()) if names else value.items():
            yield from _pieces(key, depth - 1)
            yield from _pieces(item, depth - 1)
    elif isinstance(value, list | tuple):
        yield f"sequence {len(value)}".encode()
        yield from _items(value, depth)
    elif isinstance(value, Set):
        yield f"set {len(value)}".encode()
        yield from sorted(digest_of(item).encode() for item in value)
    else:
        yield from _object_pieces(value, depth)


def _items(items: Any, depth: int) -> Iterator[bytes]:
    for item in items:
        yield from _pieces(item, depth - 1)


def _tensor_pieces(value: torch.Tensor) -> Iterator[bytes]:
    local = local_of(value).detach()
    if local.layout != torch.strided:
        if local.layout != torch.sparse_coo:
            local = local.to_sparse_coo()  # type: ignore[no-untyped-call]
        local = local.coalesce()
        yield from _tensor_pieces(local.indices())
        yield from _tensor_pieces(local.values())
        return
    yield f"tensor {local.dtype} {tuple(local.shape)}".encode()
    if local.is_meta or local.numel() == 0 or local.dtype not in torch_dtypes.NAME_OF:
        return
    plain = local.resolve_conj().resolve_neg().cpu().contiguous()
    yield torch_dtypes.as_carrier(plain).reshape(-1).numpy().tobytes()


def _object_pieces(value: Any, depth: int) -> Iterator[bytes]:
    yield f"object {type(value).__qualname__}".encode()
    if callable(take := getattr(value, "state_dict", None)):
        yield from _pieces(take(), depth - 1)
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        yield from _pieces(dict(vars(value)), depth - 1)


def draws() -> dict[str, str]:
    """Return digests of the states of the global generators."""
    return {
        "torch": digest_of(torch.get_rng_state()),
        "NumPy": digest_of(np.random.get_state()),
        "Python": digest_of(random.getstate()),
    }


def state_digests(state: Mapping[str, Any], *, rank: int = 0) -> dict[str, LeafDigest]:
    """Return a digest for each tensor and each plain value of the tracked state of ``rank``.

    A sharded tensor counts by this rank's part. Of what the rank has for itself, a value that is
    another one each time it is asked for, such as the time since the start, is left out.
    """
    try:
        flat = flatten(state, rank=rank)
        found = _leaves_of(flat)
        if flat.per_rank:
            again = _leaves_of(flatten(state, rank=rank))
            moving = [n for n, x in found.items() if x.kind == "own" and x != again.get(n)]
            for name in moving:
                del found[name]
    except StateError:  # the snapshot says so in its own words
        return {}
    return found


def has_own(state: Mapping[str, Any]) -> bool:
    """Return whether a part of the state is each rank's own."""
    try:
        return bool(flatten(state).per_rank)
    except StateError:
        return False


def _leaves_of(flat: FlatState) -> dict[str, LeafDigest]:
    found: dict[str, LeafDigest] = {}
    for name, leaf in flat.tensors.items():
        if isinstance(leaf, torch.Tensor):
            kind: Kind = "buffer" if name in flat.volatile else "parameter"
            kind = "shard" if isinstance(leaf, DTensor) else kind
            found[name] = _tensor_leaf(leaf, "own" if name in flat.own else kind)
    kinds: tuple[tuple[dict[str, Json], Kind], ...] = (
        (flat.values, "value"),
        (flat.rank_values, "own"),
    )
    for values, plain in kinds:
        for name, value in values.items():
            for path, item in _plain_items(name, value):
                found[path] = LeafDigest(kind=plain, digest=digest_of(item), shown=shown(item))
    return found


def _tensor_leaf(leaf: torch.Tensor, kind: Kind) -> LeafDigest:
    local = local_of(leaf).detach()
    if not local.is_floating_point():
        text = shown(local.item()) if local.numel() == 1 else ""
        return LeafDigest(kind=kind, digest=digest_of(local), shown=text)
    numbers = local.double().cpu().reshape(-1)
    weights = torch.cos(torch.arange(len(numbers), dtype=torch.float64))
    return LeafDigest(
        kind=kind,
        digest=digest_of(local),
        shown=shown(numbers.item()) if len(numbers) == 1 else "",
        norm=_value_of(numbers.norm()),
        mark=_value_of(numbers @ weights),
    )


def _value_of(number: torch.Tensor) -> float:
    """Return a number; -1 for one that is not finite, which JSON does not have."""
    found = float(number)
    return found if math.isfinite(found) else -1.0


def _plain_items(path: str, value: Json) -> Iterator[tuple[str, Json]]:
    """Yield the plain values in a tree of them, by path; tensors in it have a name of their own."""
    if isinstance(value, dict) and [*value] == ["$map"]:  # one whose order counts
        items = cast("list[tuple[Json, Json]]", value["$map"])
        if all(isinstance(key, str) for key, _ in items):
            value = {str(key): item for key, item in items}
    if isinstance(value, dict) and not any(str(key).startswith("$") for key in value):
        for key, item in value.items():
            yield from _plain_items(f"{path}.{key}", item)
    elif not isinstance(value, dict):
        yield path, value
    elif "$tensor" not in value and "$rank" not in value:
        yield path, msgspec.json.encode(value, order="deterministic").decode()


def shown(value: Any) -> str:
    """Return a short text of a plain value, empty for a long one."""
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= _SHORT else ""
