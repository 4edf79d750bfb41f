"""The tensors of a sea that is replayed, on one rank, by the code of the islands themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

from holdfast.ckpt import api
from holdfast.ckpt.errors import MismatchError, NotFoundError
from holdfast.ckpt.state.local_boxes import Leaf
from holdfast.ckpt.types import Json
from holdfast.elastic.islands.island import KEY
from holdfast.elastic.islands.pairs.tensors import PairTensors
from holdfast.elastic.islands.tensors import Merge, SeaTensors
from holdfast.elastic.sea.records import Founded, Merged, Parameter, Part
from holdfast.elastic.sea.settings import Islands, Nesterov

_ADOPTED: Final = "bases"


class OneRank:
    """The only rank of a world."""

    rank: Final = 0
    size: Final = 1

    def gather(self, value: Json) -> list[Json]:
        """Return the value of the only rank."""
        return [value]

    def sum_(self, tensor: torch.Tensor) -> None:
        """Leave the tensor as it is: it is the sum."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Leave the tensor as it is."""


class ReplayedSea:
    """Weights and momentum of a sea, as large as its parameters; at first they are zeros."""

    def __init__(self, founded: Founded) -> None:
        agreed = founded.settings
        islands = Islands(
            every=agreed.every,
            portions=agreed.portions,
            overlap=1,
            bits=agreed.bits,
            outer=Nesterov(agreed.lr, agreed.momentum),
            topology=agreed.topology,
        )
        self._founded = founded
        kind = PairTensors if agreed.topology == "pairs" else SeaTensors
        self._tensors = kind(modules_of(founded.parameters), OneRank(), islands)

    @property
    def weights(self) -> dict[str, Leaf]:
        """The weights by name."""
        return self._tensors.weights

    def digest(self, portion: int) -> str:
        """Return the digest of a portion, as works state it."""
        return self._tensors.digests([portion])[0]

    def digest_of_weights(self) -> str:
        """Return the digest of all weights, as the first record states it."""
        return self._tensors.digest_of_weights()

    def merge(self, record: Merged, payloads: Sequence[bytes]) -> None:
        """Move the portion of a merge by it."""
        self.meet(record, payloads, own=-1)

    def meet(self, record: Merged, payloads: Sequence[bytes], *, own: int) -> None:
        """Move a portion by a meeting; ``own`` is the place of the island's payload."""
        merge = Merge(
            portion=record.portion,
            weights=[part.weight for part in record.parts],
            whole=record.whole,
            own=own,
        )
        self._tensors.adopt(merge, payloads)

    def merge_last(self, parts: Sequence[Sequence[Part]], payload: Callable[[Part], bytes]) -> None:
        """Take the last merge of islands that met in pairs: of each portion's works."""
        assert isinstance(self._tensors, PairTensors)
        for portion, works in enumerate(parts):
            weights = [part.weight for part in works]
            self._tensors.merge_last(portion, weights, [payload(part) for part in works])

    def load(self, root: str | Path, *, step: int | None) -> list[int]:
        """Take the weights of a checkpoint; return the merges of each portion that they have.

        It is one of an island, or one of a model with the first weights of the sea. Raises
        ``MismatchError`` for any other.
        """
        with api.open(root, step=step) as found:
            values = found.values.get(f"{KEY}.counters")
        tensors = self._tensors
        if values is not None:
            tensors.load(lambda own: api.load(root, {KEY: own}, step=step, strict="ignore-extra"))
            return list(values[_ADOPTED])
        self._load_weights(root, step=step)
        if self.digest_of_weights() != self._founded.digest:
            raise MismatchError(
                f"{root}: its weights are not the first ones of the sea, and it is no checkpoint "
                "of an island; give a checkpoint that an island wrote (checkpoint=...), or one of "
                "the model as it was built"
            )
        return [0] * self._founded.settings.portions

    def _load_weights(self, root: str | Path, *, step: int | None) -> None:
        api.load(root, self._tensors.weights, step=step, strict="ignore-extra")

    def equals(self, root: str | Path) -> bool | None:
        """Return whether a checkpoint has these weights, bit for bit; None if there is none."""
        try:
            with api.open(root) as found:
                return all(
                    torch.equal(_bits(found[name][...]), _bits(mine))
                    for name, mine in self._tensors.weights.items()
                )
        except NotFoundError:
            return None


def _bits(leaf: Leaf) -> torch.Tensor:
    assert isinstance(leaf, torch.Tensor)
    return leaf.contiguous().view(torch.int32)


def modules_of(parameters: Sequence[Parameter]) -> dict[str, nn.Module]:
    """Return modules whose trained parameters have these names and shapes; they are zeros."""
    roots: dict[str, nn.Module] = {}
    for each in parameters:
        first, *path, last = each.name.split(".")
        home = roots.setdefault(first, nn.Module())
        for part in path:
            if part not in dict(home.named_children()):
                home.add_module(part, nn.Module())
            home = home.get_submodule(part)
        home.register_parameter(last, nn.Parameter(torch.zeros(each.shape)))
    return roots
