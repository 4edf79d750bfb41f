"""Running statistics of norm layers: noted per microbatch, replayed in the order of microbatches.

During a pass the buffers of a layer keep their values from its start. Each forward in training
writes the statistics of its batch into buffers of its own. After the pass every rank applies those
of all ranks to its buffers, in the order of microbatches and, within one, of the forwards. So they
become those of a loop over all microbatches, whichever rank ran which.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from holdfast.ckpt.torch_private import BatchNorm, InstanceNorm, NormBase
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.summing import Reducer, sum_whole
from holdfast.elastic.groups.by_microbatch import STAND_IN
from holdfast.elastic.groups.shards import experts_of

_KEPT = ("running_mean", "running_var", "num_batches_tracked")
_SYNCHRONIZED = ("syncbatchnorm", "syncbn", "synchronizedbatchnorm")
_FORWARDS = (BatchNorm.forward, InstanceNorm.forward)
_TIMM = "BatchNormAct"  # forwards of timm's that call F.batch_norm like torch's own


@dataclass(slots=True, eq=False)
class _NormLayer:
    """A norm layer, and the statistics of its forwards in the pass by microbatch.

    ``fresh``: those of the present microbatch; a hook of a compiled model must not see the number.
    ``is_narrow``: its input has 16 bits, so torch's kernel adds in float32, not in float64.
    """

    name: str
    module: Any
    calls: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    fresh: list[torch.Tensor] = field(default_factory=list)
    mean: torch.Tensor | None = None
    saved: dict[str, Any] | None = None
    is_narrow: bool = False

    def factor(self, call: int) -> float:
        """Return the weight of the statistics of the ``call``-th forward of the pass."""
        momentum = self.module.momentum
        if momentum is not None:
            return float(momentum)
        tracked = self.module.num_batches_tracked
        if isinstance(self.module, InstanceNorm) or tracked is None:
            return 0.0  # as torch's forwards have it
        return 1.0 / float(tracked + call)


class RunningStats:
    """The running statistics of BatchNorm and InstanceNorm layers over one pass at a time.

    ``reducer`` reduces over the ranks that run other microbatches with the same layers.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._layers: dict[int, _NormLayer] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._microbatch: int | None = None
        self._active = False

    def learn(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """Hook the layers among the modules ``parts``, each with its name."""
        for name, part in parts:
            if not isinstance(part, NormBase) or not _is_known(part):
                if _is_synchronized(part) and id(part) not in self._layers:
                    layer = self._layers.setdefault(id(part), _NormLayer(name, part))
                    refuse = functools.partial(self._refuse_synchronized, layer)
                    self._handles.append(part.register_forward_pre_hook(refuse))
                continue
            if id(part) not in self._layers:
                layer = self._layers[id(part)] = _NormLayer(name, part)
                before, after = (functools.partial(f, layer) for f in (self._before, self._after))
                self._handles.append(part.register_forward_pre_hook(before))
                self._handles.append(part.register_forward_hook(after, always_call=True))

    def begin_pass(self) -> None:
        """Start a pass."""
        self._microbatch, self._active = None, False
        for layer in self._layers.values():
            layer.calls, layer.fresh, layer.saved, layer.is_narrow = {}, [], None, False
            layer.mean = getattr(layer.module, "running_mean", None)

    def begin_microbatch(self, number: int | None) -> None:
        """Note the microbatch to which the next forwards belong; None: the pass is over.

        Those of `STAND_IN` count for nothing.
        """
        for layer in self._layers.values():
            if layer.fresh:
                assert self._microbatch is not None, "the forwards were in a microbatch"
                layer.calls.setdefault(self._microbatch, []).extend(layer.fresh)
                layer.fresh = []
        self._microbatch, self._active = number, number is not None

    def _before(self, layer: _NormLayer, module: Any, args: tuple[Any, ...]) -> None:
        """Give a forward buffers of its own, in which it leaves the statistics of its batch.

        Those of a functional call are left alone.
        """
        mean: torch.Tensor | None = module.running_mean
        if not self._active or not module.training or not module.track_running_stats:
            return
        if mean is None or mean is not layer.mean:
            return
        layer.saved = {key: getattr(module, key) for key in (*_KEPT, "momentum")}
        with torch.no_grad():
            both = mean.new_zeros(2, *mean.shape)
        module.running_mean, module.running_var = both[0], both[1]
        module.num_batches_tracked, module.momentum = None, 1.0
        layer.fresh.append(both)
        layer.is_narrow |= bool(args) and args[0].dtype.itemsize < torch.float32.itemsize

    def _after(self, layer: _NormLayer, module: Any, _args: object, output: object) -> None:
        saved, layer.saved = layer.saved, None
        if saved is None:
            return
        for key, value in saved.items():
            setattr(module, key, value)
        # A forward that is left by an error may have come as far as its statistics: activation
        # checkpointing leaves one so that was run again.
        if output is None and not layer.fresh[-1].any():
            layer.fresh.pop()

    def _refuse_synchronized(self, layer: _NormLayer, module: nn.Module, _args: object) -> None:
        if self._active and module.training:
            raise ConfigError(
                f"{layer.name} is a {type(module).__name__}: its result depends on which ranks run "
                "at the same time, and it waits for ever where they have unequal shares; use "
                "BatchNorm. It sees one microbatch, and its running statistics become those of "
                "all microbatches of all ranks"
            )

    def counts(self, microbatches: int) -> torch.Tensor:
        """Return how many forwards each layer had in each microbatch here, float64.

        The last column says whether its input is narrow.
        """
        table = torch.zeros(len(self._layers), microbatches + 1, dtype=torch.float64)
        for row, layer in enumerate(self._layers.values()):
            table[row, -1] = layer.is_narrow
            for microbatch, calls in layer.calls.items():
                if microbatch != STAND_IN:
                    table[row, microbatch] = len(calls)
        return table

    @torch.no_grad()
    def end_pass(self, counts: torch.Tensor) -> None:
        """Apply all ranks' statistics; ``counts`` is the largest of all ranks'. Collective."""
        ran: list[tuple[_NormLayer, torch.Tensor]] = []
        for layer, (*row, narrow) in zip(
            self._layers.values(), counts.long().tolist(), strict=True
        ):
            layer.is_narrow = bool(narrow)
            if sum(row):
                _refuse_experts(layer)
                ran.append((layer, _table(layer, row)))
            layer.calls = {}
        sum_whole([table for _, table in ran], self._reducer.sum_)
        for alike in _alike(ran):
            _replay([layer for layer, _ in alike], [table for _, table in alike])

    def keeps(self, part: nn.Module) -> bool:
        """Return whether a layer's statistics are replayed."""
        return id(part) in self._layers

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._layers.clear()


def _is_known(part: nn.Module) -> bool:
    """Return whether a layer's statistics are as torch makes them."""
    if _is_synchronized(part):
        return False
    own: Any = type(part)
    return own.forward in _FORWARDS or any(
        each.__name__.startswith(_TIMM) and each.__module__.startswith("timm.")
        for each in own.__mro__
    )


def _is_synchronized(part: nn.Module) -> bool:
    names = [each.__name__.lower().replace("_", "") for each in type(part).__mro__]
    return any(word in name for name in names for word in _SYNCHRONIZED)


def _refuse_experts(layer: _NormLayer) -> None:
    weight = layer.module.weight
    if weight is not None and experts_of(weight) is not None:
        raise ConfigError(
            f"{layer.name} is a {type(layer.module).__name__} in an expert: its statistics follow "
            "the tokens that other ranks send it; use a norm without running statistics "
            "(LayerNorm, RMSNorm)"
        )


def _table(layer: _NormLayer, counts: Sequence[int]) -> torch.Tensor:
    """Return the mean and variance of every forward of the pass, zeros for other ranks'."""
    mean = layer.module.running_mean
    table = torch.zeros(sum(counts), 2, mean.numel(), dtype=mean.dtype, device=mean.device)
    at = 0
    for microbatch, count in enumerate(counts):
        if calls := layer.calls.get(microbatch):
            torch.stack(calls, out=table[at : at + count])
        at += count
    return table.add_(0.0)  # a sum with zeros has no -0 either


def _alike(
    ran: Sequence[tuple[_NormLayer, torch.Tensor]],
) -> Iterator[list[tuple[_NormLayer, torch.Tensor]]]:
    """Yield layers whose statistics can be replayed together."""
    groups: dict[object, list[tuple[_NormLayer, torch.Tensor]]] = {}
    for layer, table in ran:
        momentum = (layer.factor(1), layer.module.momentum)
        key = (len(table), table.dtype, table.device, layer.is_narrow, momentum)
        groups.setdefault(key, []).append((layer, table))
    yield from groups.values()


def _replay(layers: Sequence[_NormLayer], tables: Sequence[torch.Tensor]) -> None:
    """Apply the statistics of every forward, in the roundings of torch's kernel for the CPU.

    That one adds the variance in its wider type, but the mean in the buffers' own.
    """
    stats = torch.cat(list(tables), dim=2) if len(tables) > 1 else tables[0]
    wide = torch.float32 if layers[0].is_narrow else torch.float64
    means = torch.cat([layer.module.running_mean for layer in layers])
    variances = torch.cat([layer.module.running_var for layer in layers])
    for call, (mean, variance) in enumerate(stats, start=1):
        new = torch.tensor(layers[0].factor(call), dtype=stats.dtype)
        old = 1 - new
        means = means.mul_(old).add_(mean.mul_(new))
        variances = variances.mul_(old).to(wide).add_(variance.to(wide).mul_(new.to(wide)))
        variances = variances.to(stats.dtype)
    sizes = [table.shape[2] for table in tables]
    for layer, mean, variance in zip(
        layers, torch.split(means, sizes), torch.split(variances, sizes), strict=True
    ):
        layer.module.running_mean.copy_(mean)
        layer.module.running_var.copy_(variance)
        if isinstance(layer.module, BatchNorm) and layer.module.num_batches_tracked is not None:
            layer.module.num_batches_tracked.add_(len(stats))
