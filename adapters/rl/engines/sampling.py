"""A process that samples for a user-written loop with engines: servers that come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from holdfast.adapters.rl.engines.pool import EnginePool
from holdfast.adapters.rl.engines.protocol import SamplingEngine
from holdfast.adapters.rl.engines.seats import EngineSource
from holdfast.adapters.rl.sampler_process import Sampler, attach
from holdfast.adapters.rl.samples.sample import Sample


def sample_for(
    directory: str | Path,
    engines: Sequence[SamplingEngine] | EngineSource,
    *,
    node: str | None = None,
    log_every_tokens: int = 1,
    wait_s: float = 120.0,
) -> None:
    """Sample on ``engines`` for the loop that serves ``directory``, until it is over.

    Each token is in the log before the next one is taken. An engine that is lost hands its answers
    to the others, and any number of such processes may run beside each other. In mode ``BOUNDED``
    answers go on under new weights as soon as an engine has loaded them. ``engines`` as in
    `EnginePool`, the other arguments as in `attach`. Raises ``JobFailedError`` when there is no
    engine, none gives a token, or no loop is there, for ``wait_s``.
    """
    asked = engines if isinstance(engines, Sequence) else [engines]
    offered = _Offered(copies=any(getattr(each, "takes_weights", True) for each in asked))
    with attach(
        directory, offered.keep, node=node, log_every_tokens=log_every_tokens, wait_s=wait_s
    ) as sampler:
        pool = EnginePool(engines, pinned=sampler.pinned, wait_s=wait_s)
        pool.work(lambda room: _more(room, sampler, pool, offered))


class _Offered:
    """The weights that the loop's side gave last, until the pool has got them."""

    def __init__(self, *, copies: bool) -> None:
        self._copies, self._weights = copies, dict[str, Tensor]()
        self.is_new = False

    def keep(self, weights: Mapping[str, Tensor]) -> None:
        """Keep copies of the weights, which are overwritten by the next ones, if wanted."""
        self._weights = {name: each.clone() for name, each in weights.items() if self._copies}
        self.is_new = True

    def take(self) -> Mapping[str, Tensor]:
        """Return the weights."""
        self.is_new = False
        return self._weights


def _more(room: int, sampler: Sampler, pool: EnginePool, offered: _Offered) -> Sequence[Sample]:
    """Return answers to begin, and offer the pool new weights."""
    taken = sampler.take(room) if room else sampler.renew()
    if offered.is_new and sampler.version is not None:
        pool.offer(offered.take(), version=sampler.version)
    if not taken and sampler.over:
        raise StopIteration
    return taken
