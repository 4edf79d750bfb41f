"""The buffers of the tracked modules: equal on all replicas after every pass, by one rule each.

- Running statistics of norm layers become those of a loop over all microbatches (`RunningStats`).
- The vectors of spectral norms make one update per pass (`PowerIterations`).
- Other buffers that a pass changed get, on every rank, the values of the lowest rank on which they
  changed. With ``exact`` they are refused, because they follow the microbatches of one rank.

Buffers that are not persistent are no state: nothing is done about them. A pass in which a CUDA
graph was replayed may have changed any, so their contents are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from holdfast.ckpt.state.kinds.model_parts import ModelParts
from holdfast.ckpt.state.local_boxes import writes_of
from holdfast.ckpt.torch_private import module_dicts, transient_buffers_of
from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.power_iterations import PowerIterations
from holdfast.elastic.gradients.replays import ReplayWatch
from holdfast.elastic.gradients.running_stats import RunningStats
from holdfast.elastic.gradients.summing import Reducer, sum_whole
from holdfast.elastic.gradients.wrapped import Parts
from holdfast.elastic.groups.shards import local_of


class ReplicaReducer(Reducer, Protocol):
    """This rank among those that run other microbatches with the same part of the model."""

    index: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    """A buffer as it was when the pass began."""

    name: str
    module: nn.Module
    key: str
    tensor: torch.Tensor
    version: int

    @property
    def now(self) -> torch.Tensor:
        """The buffer as it is now."""
        found = getattr(self.module, self.key, None)
        return found if isinstance(found, torch.Tensor) else self.tensor

    def has_changed(self) -> bool:
        """Return whether the pass wrote to the buffer or replaced it."""
        return self.now is not self.tensor or _version(self.now) != self.version


class PassBuffers:
    """The buffers of the tracked modules over one pass at a time."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module | ModelParts],
        replica: ReplicaReducer,
        *,
        microbatches: int,
        exact: Exact,
    ) -> None:
        self._parts, self._replica = Parts(modules), replica
        self._microbatches, self._exact = microbatches, exact
        self._stats, self._power = RunningStats(replica), PowerIterations()
        self._watched: list[_Watched] = []
        self._contents: list[torch.Tensor] = []
        self._replays = ReplayWatch(self._keep_contents)

    def _keep_contents(self) -> None:
        """Copy the buffers as they are, before a CUDA graph may write to them."""
        with torch.no_grad():
            self._contents = [local_of(each.now).detach().clone() for each in self._watched]

    def begin_pass(self) -> None:
        """Start a pass over this rank's microbatches."""
        if self._parts.renew():
            self._stats.learn(self._parts.named)
            self._power.learn(self._parts.named)
        self._stats.begin_pass()
        self._power.begin_pass()
        self._watched = [
            _Watched(
                name=f"{name}.{key}",
                module=part,
                key=key,
                tensor=buffer,
                version=_version(buffer),
            )
            for name, part in self._parts.named
            for key, buffer in module_dicts(part)[1].items()
            if buffer is not None and key not in transient_buffers_of(part) and not is_lazy(buffer)
        ]
        self._replays.begin()

    def begin_microbatch(self, number: int) -> None:
        """Note the microbatch to which the next forwards belong."""
        self._stats.begin_microbatch(number)
        self._power.active = True

    def end_pass(self, *, apply: bool = True) -> None:
        """Make the buffers equal on all replicas; without ``apply`` leave out the statistics.

        Collective. Raises ``ConfigError``, naming the buffer, on all ranks together.
        """
        self._stats.begin_microbatch(None)
        self._power.end_pass()
        self._replays.end()
        watched, replica = self._watched, self._replica
        counts = self._stats.counts(self._microbatches)
        if not counts.numel() and not watched:
            return
        # The rank with the largest number is the lowest.
        changed = [replica.size - replica.index if has else 0 for has in self._have_changed()]
        sizes = torch.tensor([float(local_of(w.now).nbytes) for w in watched], dtype=torch.float64)
        vector = torch.cat([counts.flatten(), sizes.new_tensor(changed), sizes, -sizes])
        replica.max_(vector)
        table, rest = torch.split(vector, [counts.numel(), 3 * len(watched)])
        owners, largest, smallest = rest.view(3, -1).tolist()
        self._stats.end_pass(table.view_as(counts) * float(apply))
        moved = [(w, replica.size - int(o)) for w, o in zip(watched, owners, strict=True) if o]
        self._refuse([w for w, _ in moved])
        for each, most, least in zip(watched, largest, smallest, strict=True):
            if most != -least:
                raise ConfigError(
                    f"the buffer {each.name} has {most:.0f} bytes on one rank and {-least:.0f} on "
                    "another: give it a fixed size, or register it with persistent=False"
                )
        _spread([w.now for w, _ in moved], [owner for _, owner in moved], replica)

    def _have_changed(self) -> list[bool]:
        """Return of each buffer whether the pass, or a graph replayed in it, changed it."""
        found = [each.has_changed() for each in self._watched]
        contents, self._contents = self._contents, []
        for at, before in enumerate(contents):
            now = local_of(self._watched[at].now).detach()
            found[at] = found[at] or not torch.equal(_raw(now), _raw(before))
        return found

    def _refuse(self, changed: Sequence[_Watched]) -> None:
        for each in changed if self._exact else ():
            if self._power.keeps(each.module, each.key):
                continue
            kind = type(each.module).__name__
            if self._stats.keeps(each.module):
                raise ConfigError(
                    f"exact={self._exact!r}: the pass over run.microbatches wrote to {each.name} "
                    f"(of a {kind}) past the hooks of run.track: call run.track before the first "
                    "forward of a compiled model, capture no CUDA graph of it, and change "
                    "statistics by hand after the pass"
                )
            raise ConfigError(
                f"exact={self._exact!r}: the pass over run.microbatches changed the buffer "
                f"{each.name} (of a {kind}), whose values then follow the microbatches of one "
                "rank: change it after the pass, equally on all ranks, from values of all "
                "microbatches (run.gather, run.reduce); register it with persistent=False if it "
                "is a cache; or set exact=None"
            )

    def close(self) -> None:
        """Remove every hook."""
        self._stats.close()
        self._power.close()
        self._replays.close()
        self._watched, self._contents = [], []


@torch.no_grad()
def _spread(
    buffers: Sequence[torch.Tensor], owners: Sequence[int], replica: ReplicaReducer
) -> None:
    """Give all replicas the bytes of each buffer at its owner."""
    if replica.size == 1:
        return
    found = []
    for buffer, owner in zip(buffers, owners, strict=True):
        raw = _raw(local_of(buffer).detach())
        found.append(raw.clone() if owner == replica.index else torch.zeros_like(raw))
    sum_whole(found, replica.sum_)
    for buffer, raw, owner in zip(buffers, found, owners, strict=True):
        if owner != replica.index:
            local = local_of(buffer)
            local.copy_(raw.view(local.dtype).view(local.shape))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor: no NaN is equal to itself."""
    return tensor.reshape(-1).view(torch.uint8)


def _version(buffer: torch.Tensor) -> int:
    """Return the count of writes to a buffer; inference tensors have none."""
    return -1 if buffer.is_inference() else writes_of(buffer)
