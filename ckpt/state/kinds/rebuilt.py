"""Frozen weights that the program builds again: a state has their digests in the place of bytes.

A digest is the CRC-64/NVME of a tensor's bytes in C order. Ranks that hold parts of the tensor
compute their shares of it, so the digest does not depend on the layout. It is compared before
anything is restored, at every rank. In between, a write that torch counts makes the tensor an
ordinary part of the state. One that leaves no trace is found by a checksum before each snapshot is
sealed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from holdfast.ckpt.errors import ArgumentError, MismatchError, StateError
from holdfast.ckpt.native import isal
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.kinds.model_parts import ModelParts
from holdfast.ckpt.state.local_boxes import Leaf, LocalBox, local_boxes_of, local_of, mark_of
from holdfast.ckpt.state.plain import DIGEST
from holdfast.ckpt.state.tensor_shares import combined, packed, shares_of
from holdfast.ckpt.types import Json

_UNCHECKED: Final = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """A frozen tensor as it was built: its digest, its mark, and the CRC32C of its local boxes.

    The digest `_UNCHECKED` fits every other.
    """

    digest: str
    mark: tuple[int, int]
    crcs: tuple[int, ...] = ()


class Rebuilt:
    """A module whose frozen parameters the program builds again, so that nothing of them is saved.

    ``module`` is a module or `ModelParts`. Parameters without a gradient when the state is first
    used lie in no snapshot and in no checkpoint; their digests do. The program must build the same
    weights again before a restore, as from a pretrained checkpoint. A frozen parameter that is
    trained or written to later is saved from then on. Everything else in the module is saved as
    ever: parameters with a gradient, buffers.

    Raises ``ArgumentError`` for anything but a module.
    """

    __slots__ = ("_built", "_parameters", "module")

    def __init__(self, module: nn.Module | ModelParts) -> None:
        if not isinstance(module, nn.Module | ModelParts):
            raise ArgumentError(f"Rebuilt of a {type(module).__name__}: give a module")
        self.module = module
        self._built: dict[str, _Built] | None = None
        self._parameters: Sequence[nn.Parameter] = ()

    def __repr__(self) -> str:
        return f"Rebuilt({type(self.module).__name__})"

    def left_out(
        self, frozen: Mapping[str, Leaf], parameters: Sequence[nn.Parameter]
    ) -> dict[str, Leaf]:
        """Return the tensors that are not saved, of those that have no gradient now.

        All others are saved from now on. ``parameters`` are those that the ``frozen`` tensors
        belong to.
        """
        self._parameters = parameters
        if self._built is None:
            return dict(frozen)
        self._built = {
            fqn: built
            for fqn, built in self._built.items()
            if fqn in frozen and mark_of(frozen[fqn]) == built.mark
        }
        return {fqn: leaf for fqn, leaf in frozen.items() if fqn in self._built}

    def is_same(self, left_out: Mapping[str, Leaf]) -> bool:
        """True if no tensor that was left out has changed since in a way that torch counts."""
        built = self._built or {}
        return not any(parameter.requires_grad for parameter in self._parameters) and all(
            mark_of(left_out[fqn]) == each.mark for fqn, each in built.items()
        )

    def value_of(self, fqn: str, leaf: Leaf) -> Json | None:
        """Return what is saved in the place of a tensor; None before its digest is known."""
        if self._built is None:
            return None
        dtype = torch_dtypes.NAME_OF[local_of(leaf).dtype]
        return {DIGEST: self._built[fqn].digest, "dtype": dtype, "shape": list(leaf.shape)}

    def difference(self, fqn: str, leaf: Leaf, saved: Json) -> str:
        """Say in words how a tensor differs from the one that was saved, nothing if it does not."""
        mine = self.value_of(fqn, leaf)
        if not isinstance(mine, dict) or not isinstance(saved, dict):
            raise StateError(f"{fqn}: no digest of it is known here; call rebuilt.inspect first")
        if mine[DIGEST] == _UNCHECKED or mine == saved:
            return ""
        return (
            f"{fqn} was built as {mine['dtype']} {mine['shape']} with the digest {mine[DIGEST]}, "
            f"the saved run had {saved.get('dtype')} {saved.get('shape')} with "
            f"{saved.get(DIGEST)}: build the same weights again (file, revision, seed, dtype, "
            "quantisation)"
        )

    def saved_from_now(self, fqn: str) -> None:
        """Note that a tensor has contents that the program does not build."""
        (self._built or {}).pop(fqn, None)

    def note(self, built: Mapping[str, _Built] | None) -> None:
        """Note the digests of the tensors that are left out; None: look at the module anew."""
        self._built = None if built is None else dict(built)

    def changed(self, fqn: str, leaf: Leaf) -> str:
        """Say in words that a tensor in host memory has other bytes than it was built with."""
        built = (self._built or {}).get(fqn)
        if built is None or local_of(leaf).device.type != "cpu":
            return ""
        if tuple(_crc32c(box) for box in local_boxes_of(fqn, leaf)) == built.crcs:
            return ""
        if mark_of(leaf) != built.mark:
            return f"{fqn} was written to"
        raise StateError(
            f"{fqn} is frozen and tracked as Rebuilt, and was written to in a way that torch does "
            "not count (.data, NumPy, a kernel of another library): a restore would lack that. "
            "Write to it under torch.no_grad() instead, or track the module itself, without Rebuilt"
        )


def module_of(value: Any) -> Any:
    """Return the module of a `Rebuilt`, and anything else as it is."""
    return value.module if isinstance(value, Rebuilt) else value


def inspect(
    holders: Mapping[str, tuple[Rebuilt, Mapping[str, Leaf]]],
    *,
    gather: Callable[[Any], list[Any]],
) -> None:
    """Compute the digests of the tensors that are left out, together with all ranks.

    ``holders`` are the `Rebuilt` by the name of their entry, with those tensors. ``gather`` takes
    a plain value and returns every rank's value, in rank order. Raises ``MismatchError`` if two
    ranks have built different contents.
    """
    tensors_of = {fqn: leaf for _, tensors in holders.values() for fqn, leaf in tensors.items()}
    digests = combined(gather(shares_of(tensors_of)), differs=_differ)
    for holder, tensors in holders.values():
        holder.note(
            {
                fqn: _Built(
                    digest=digests[fqn],
                    mark=mark_of(leaf),
                    crcs=tuple(_crc32c(box) for box in local_boxes_of(fqn, leaf)),
                )
                for fqn, leaf in tensors.items()
            }
        )


def trust(holders: Iterable[tuple[Rebuilt, Mapping[str, Leaf]]]) -> None:
    """Take the tensors that are left out for right, where a state is restored for practice only."""
    for holder, tensors in holders:
        holder.note(
            {fqn: _Built(digest=_UNCHECKED, mark=mark_of(leaf)) for fqn, leaf in tensors.items()}
        )


def _differ(fqn: str, rank: int, other: int) -> MismatchError:
    return MismatchError(
        f"{fqn} is Rebuilt, and ranks {rank} and {other} have built different contents: build it "
        "alike on all ranks, from the same file or the run's seed"
    )


def _crc32c(box: LocalBox) -> int:
    return isal.crc32c(packed(box).reshape(-1).view(torch.uint8).numpy().data)
