"""A hash of a whole state that does not depend on its sharding or on the number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from holdfast.ckpt.errors import MismatchError, StateError
from holdfast.ckpt.state import plain, torch_dtypes
from holdfast.ckpt.state.flatten import check_state, flatten


def state_hash(state: Mapping[str, Any], *, group: dist.ProcessGroup | None = None) -> str:
    """Return the SHA-256 of all tensors, in FQN order, and of the plain values of ``state``.

    Per-rank values do not count. Collective over the meshes of the state's DTensors, one tensor at
    a time. With ``group``, also compare the hashes of its ranks: ``MismatchError`` if they
    differ. Raises ``ArgumentError`` for a state that is no mapping.
    """
    check_state(state)
    flat = flatten(state)
    digest = hashlib.sha256()
    for fqn in sorted(flat.tensors.keys() - flat.own):
        leaf = flat.tensors[fqn]
        if not isinstance(leaf, torch.Tensor):
            raise StateError(f"{fqn}: {leaf!r} cannot be hashed: no rank has all of it; save it")
        full = whole(leaf)
        name = torch_dtypes.NAME_OF[full.dtype]
        digest.update(f"{fqn} {name} {tuple(full.shape)}\n".encode())
        digest.update(torch_dtypes.as_carrier(full).reshape(-1).numpy().view(np.uint8).data)
    digest.update(msgspec.json.encode(plain.unordered(flat.values), order="deterministic"))
    result = digest.hexdigest()
    if group is not None:
        everyone: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, result, group=group)
        if len(set(everyone)) != 1:
            raise MismatchError(
                f"the ranks' states differ: hashes {everyone}; tensors that are not sharded, and "
                "plain values, must be equal on all ranks"
            )
    return result


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor on the CPU, contiguous; collective for a DTensor."""
    value = tensor.detach()
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.resolve_conj().resolve_neg().cpu().contiguous()
