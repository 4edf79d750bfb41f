"""Recomputation of a row's log-probabilities, under the very versions that sampled it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from holdfast.adapters.rl.loss.batch import TrainingBatch
from holdfast.adapters.rl.policy.policy import Policy
from holdfast.adapters.rl.policy.rounding import Precision, round_weights
from holdfast.adapters.rl.training.proximal import Recomputed


class Recheck:
    """Recomputes recorded log-probabilities, of one row at a time.

    ``build`` makes an unsharded policy, at the first use; ``weights_of`` returns the tensors of a
    version, from the kept snapshots. ``precision`` is that of the weights that sampled.
    """

    def __init__(
        self,
        build: Callable[[], Policy],
        weights_of: Callable[[int], Mapping[str, Tensor]],
        *,
        precision: Precision = "full",
    ) -> None:
        self._build, self._weights_of, self._precision = build, weights_of, precision
        self._recomputed: Recomputed | None = None

    def difference(self, batch: TrainingBatch, row: int) -> float:
        """Return the largest absolute error of the recorded log-probabilities of ``row``.

        Raises the errors of ``weights_of``.
        """
        if self._recomputed is None:
            policy = self._build()
            self._recomputed = Recomputed(
                policy, self._weights_of, filled=lambda: round_weights(policy, self._precision)
            )
        part = batch.part(row, of=len(batch.tokens)).trimmed()
        (found,) = self._recomputed.logprobs([part])
        return float(((found - part.behavior) * part.mask).abs().max())


def row_at(step: int, *, every: int, rows: int) -> int | None:
    """Return which of ``rows`` is checked in ``step``, each in its turn; None: none."""
    if not every or not rows or step % every:
        return None
    return step // every % rows
