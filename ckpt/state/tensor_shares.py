"""The digest of a tensor from the boxes that ranks hold, each of which reads its own alone.

A digest is the CRC-64/NVME of the tensor's bytes in C order, in hexadecimal digits; it does not
depend on the sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from holdfast.ckpt.native import runs_apart
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.copying import resolved
from holdfast.ckpt.state.local_boxes import Leaf, LocalBox, local_boxes_of

Shares: TypeAlias = dict[str, dict[str, str]]
"""The share of each box in its tensor's checksum, by the tensor's name and the box's place."""


def shares_of(tensors: Mapping[str, Leaf]) -> Shares:
    """Return the shares of this rank's boxes."""
    return {
        fqn: {_place(box): f"{_share(box, leaf):x}" for box in local_boxes_of(fqn, leaf)}
        for fqn, leaf in tensors.items()
    }


def combined(
    everyone: Sequence[Shares], *, differs: Callable[[str, int, int], Exception]
) -> dict[str, str]:
    """Return the digests of tensors from all ranks' shares, in rank order.

    Raises ``differs(name, rank, other)`` if two ranks hold one box with different contents.
    """
    seen: dict[str, dict[str, tuple[int, str]]] = {}
    for rank, shares in enumerate(everyone):
        for fqn, places in shares.items():
            mine = seen.setdefault(fqn, {})
            for place, share in places.items():
                other, known = mine.setdefault(place, (rank, share))
                if known != share:
                    raise differs(fqn, other, rank)
    found = {}
    for fqn, mine in seen.items():
        whole = 0
        for _, share in mine.values():
            whole ^= int(share, 16)
        found[fqn] = f"{whole:016x}"
    return found


def packed(box: LocalBox) -> torch.Tensor:
    """Return the contents of a box on the CPU, contiguous, in a dtype that NumPy has."""
    return torch_dtypes.as_carrier(resolved(box.local)).cpu().contiguous()


def _place(box: LocalBox) -> str:
    return f"{box.box.offset}{box.box.shape}"


def _share(box: LocalBox, leaf: Leaf) -> int:
    bytes_of = packed(box)
    return runs_apart.share(
        bytes_of.data_ptr(), box.box, shape=tuple(leaf.shape), itemsize=bytes_of.itemsize
    )
