"""The tensors of an island that meets others in pairs: each island has weights of its own.

A payload holds the island's progress and its weights, so two islands that have each other's know
the middle of both, to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from holdfast.ckpt.state.hashing import whole
from holdfast.elastic.islands.tensors import Merge, SeaParameter, SeaTensors, progress
from holdfast.elastic.sea import gossip, payload
from holdfast.elastic.sea.outer import Floats

_LAST = -1


class PairTensors(SeaTensors):
    """As `SeaTensors`; the weights and momentum are this island's.

    A merge of `adopt` is a meeting, with the own work in it.
    """

    def merge_last(self, portion: int, weights: Sequence[int], data: Sequence[bytes]) -> None:
        """Make the mean of all islands' weights this one's, moved by their progress; collective.

        ``data`` are their payloads at rank 0, ``weights`` those of their works. The parameters do
        not change.
        """
        whole = sum(weights)
        self.adopt(Merge(portion=portion, weights=weights, whole=whole, own=_LAST), data)

    @property
    def _width(self) -> int:
        return gossip.row_bytes(self._islands.bits)

    def _sent(self, each: SeaParameter) -> Sequence[Floats]:
        assert isinstance(each.weights, torch.Tensor)
        weights: Floats = whole(each.weights).reshape(-1).numpy()
        return progress(each), weights

    def _encode(self, values: Sequence[Floats]) -> bytes:
        own, weights = values
        return gossip.encode(own, weights, self._islands.bits)

    def _decode(
        self, rows: Sequence[memoryview], merge: Merge, n: int, cut: slice
    ) -> Sequence[Floats]:
        bits, both = self._islands.bits, [gossip.split(one, self._islands.bits) for one in rows]
        works = [(own, weight) for (own, _), weight in zip(both, merge.weights, strict=True)]
        mean = payload.mean(works, whole=merge.whole, bits=bits, n=n, rows=cut)
        middle = payload.mean(
            [(weights, 1) for _, weights in both],
            whole=len(both),
            bits=gossip.WEIGHT_BITS,
            n=n,
            rows=cut,
        )
        if merge.own == _LAST:
            return mean, middle
        own, weights = both[merge.own]
        sent = payload.value(weights, gossip.WEIGHT_BITS, n, rows=cut)
        return mean, middle - sent, payload.value(own, bits, n, rows=cut)

    def _move(self, weights: Floats, momentum: Floats, found: Sequence[Floats]) -> None:
        outer = self._islands.outer
        if len(found) == 2:  # the last merge: there is no own work beside it
            np.copyto(weights, gossip.merged(found[1], found[0], outer))
            momentum.fill(0)
        else:
            gossip.met(weights, momentum, found[0], found[1], outer)
