"""One mean gradient per step out of microbatches that several ranks run, exact on request.

Works on FSDP2 modules (their own reduce-scatter, once per step, summing) and on plain ones
(summed here, in one flat all-reduce). With ``exact`` every microbatch's gradient is rounded to
its parameter's grid before anything is added to it, so the sum is the same in any grouping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastic.errors import ConfigError, JobFailed
from elastic.reduce import (
    HEADROOM_BITS,
    MIN_EXPONENT,
    exponent_above,
    grid_exponent,
    next_bound,
    round_to_grid,
)


class Reducer(Protocol):
    """Reduces a tensor over all ranks, in place."""

    def max_(self, tensor: torch.Tensor) -> None:
        """Take the largest."""

    def sum_(self, tensor: torch.Tensor) -> None:
        """Add."""


class Gradients:
    """The gradients of the tracked modules, over one pass of microbatches at a time.

    ``bounds`` maps a parameter's name to the exponent of the bound its microbatch gradients are
    assumed to keep; it is state of the run and is updated in place. ``check`` is called between
    the parts of a backward pass and may raise to leave it.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        reducer: Reducer,
        *,
        microbatches: int,
        exact: bool,
        bounds: dict[str, int],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._modules, self._reducer, self._check = modules, reducer, check
        self._microbatches, self._exact, self._bounds = microbatches, exact, bounds
        _refuse_wrappers(modules)
        self._fsdp = [
            part
            for module in modules.values()
            for part in module.modules()
            if isinstance(part, FSDPModule)
        ]
        self.reshard()
        self._names = [name for name, parameter in self._parameters() if parameter.requires_grad]
        self._index = {name: i for i, name in enumerate(self._names)}
        self._fired = [0] * len(self._names)
        self._grids = [MIN_EXPONENT] * len(self._names)
        self._peaks = [torch.zeros(())] * len(self._names)
        self._hooked: set[str] = set()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for part in self._fsdp:
            part.set_reshard_after_forward(False, recurse=False)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True, recurse=False)
        if exact:
            self._hook_all()

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for key, module in self._modules.items():
            for fqn, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{key}.{fqn}", parameter

    def _hook_all(self) -> None:
        """Hook plain parameters now, and those that FSDP2 unshards when they first appear."""
        for name, parameter in self._parameters():
            self._hook(name, parameter)
        for key, module in self._modules.items():
            for path, part in module.named_modules():
                if isinstance(part, FSDPModule):
                    prefix = f"{key}.{path}." if path else f"{key}."
                    module_part = cast(nn.Module, part)
                    handle = module_part.register_forward_hook(self._on_forward(prefix))
                    self._handles.append(handle)

    def _on_forward(self, prefix: str) -> Callable[[nn.Module, object, object], None]:
        def on_forward(part: nn.Module, _args: object, _output: object) -> None:
            if len(self._hooked) < len(self._names):
                for fqn, parameter in part.named_parameters():
                    self._hook(prefix + fqn, parameter)

        return on_forward

    def _hook(self, name: str, parameter: nn.Parameter) -> None:
        if name in self._hooked or name not in self._index or isinstance(parameter, DTensor):
            return
        if parameter.dtype is not torch.float32:
            raise ConfigError(
                f"exact=True needs float32 parameters, {name} is {parameter.dtype}: keep the "
                "parameters in float32 (no FSDP mixed precision), or set exact=False"
            )
        index = self._index[name]

        def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
            self._check()
            self._fired[index] += 1
            if gradient.numel():
                peak = gradient.detach().abs().amax()
                self._peaks[index] = torch.maximum(self._peaks[index], peak)
            return round_to_grid(gradient, self._grids[index])

        handle = parameter.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        self._handles.append(handle)
        self._hooked.add(name)

    def begin_pass(self) -> None:
        """Start a pass over this rank's microbatches."""
        self._fired = [0] * len(self._names)
        self._peaks = [torch.zeros(())] * len(self._names)
        self._grids = [
            grid_exponent(self._bounds.get(name, MIN_EXPONENT), terms=self._microbatches)
            for name in self._names
        ]

    def begin_microbatch(self, *, last: bool) -> None:
        """Let FSDP2 communicate only in the last backward of the share."""
        for part in self._fsdp:
            part.set_requires_gradient_sync(last, recurse=False)
            part.set_reshard_after_backward(last, recurse=False)

    def end_pass(self, *, backwards: int, agree: int) -> bool:
        """Make the mean gradients, or drop them and return False: then repeat the pass.

        ``agree`` is a number that must be the same on all ranks (of whatever the pass did).
        """
        self.reshard()
        plain = [
            (name, parameter)
            for name, parameter in self._parameters()
            if parameter.requires_grad and not isinstance(parameter, DTensor)
        ]
        if self._exact and backwards:
            self._check_hooks(backwards)
        peaks, present = self._agree(plain, agree=agree)
        if backwards == 0:
            return True
        if self._exact and not self._within_bounds(peaks):
            self.clear()
            return False
        self._sum_plain([p for (_, p), there in zip(plain, present, strict=True) if there])
        self._divide()
        return True

    def _check_hooks(self, backwards: int) -> None:
        for name, parameter in self._parameters():
            index = self._index.get(name)
            if index is None:
                continue
            if parameter.grad is not None and not self._fired[index] and name not in self._hooked:
                raise ConfigError(
                    f"exact=True cannot see the gradient of {name}: its FSDP2 module was not "
                    "entered through its forward; call the module itself, not its parts"
                )
            if self._fired[index] > backwards:
                raise ConfigError(
                    f"exact=True met {self._fired[index]} gradients of {name} in {backwards} "
                    "backward passes: use non-reentrant activation checkpointing"
                )

    def _agree(
        self, plain: list[tuple[str, nn.Parameter]], *, agree: int
    ) -> tuple[list[float], list[bool]]:
        """Return every parameter's peak and every plain one's presence, over all ranks."""
        peaks = torch.stack(self._peaks) if self._peaks else torch.zeros(0)
        present = torch.tensor([p.grad is not None for _, p in plain], dtype=torch.float64)
        seen = torch.tensor([agree, -agree], dtype=torch.float64)
        vector = torch.cat([peaks.double(), present, seen])
        vector.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        self._reducer.max_(vector)
        values = vector.tolist()
        if values[-2] != -values[-1]:
            raise ConfigError(
                "the ranks did different things in the same step: every microbatch must call "
                "run.backward equally often and run.log with the same names"
            )
        count = len(self._names)
        return values[:count], [value > 0 for value in values[count:-2]]

    def _within_bounds(self, peaks: list[float]) -> bool:
        """Update the bounds; say whether all peaks kept to them."""
        within = True
        for name, peak in zip(self._names, peaks, strict=True):
            if peak == torch.inf:
                raise JobFailed(
                    f"the gradient of {name} is not finite: lower the learning rate or look at "
                    "the data; a repetition would meet the same"
                )
            bound = self._bounds.get(name, MIN_EXPONENT)
            if peak > 2.0**bound:
                within = False
                self._bounds[name] = exponent_above(peak) + HEADROOM_BITS
        if within:
            for name, peak in zip(self._names, peaks, strict=True):
                self._bounds[name] = next_bound(self._bounds.get(name, MIN_EXPONENT), peak)
        return within

    def _sum_plain(self, parameters: list[nn.Parameter]) -> None:
        if not parameters:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self._reducer.sum_(flat)
            at = 0
            for gradient in gradients:
                gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
                at += gradient.numel()

    def _divide(self) -> None:
        gradients = []
        for _, parameter in self._parameters():
            gradient = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                gradients.append(local)
        if gradients and self._microbatches > 1:
            with torch.no_grad():
                torch._foreach_div_(gradients, float(self._microbatches))

    def reshard(self) -> None:
        """Put FSDP2's parameters back into shards, wherever a forward left them whole."""
        for part in self._fsdp:
            part.reshard()

    def clear(self) -> None:
        """Drop all gradients."""
        self.reshard()
        for _, parameter in self._parameters():
            parameter.grad = None

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _refuse_wrappers(modules: Mapping[str, nn.Module]) -> None:
    """Raise ``ConfigError`` for wrappers that average gradients on their own."""
    for key, module in modules.items():
        for part in module.modules():
            if isinstance(part, DistributedDataParallel | FullyShardedDataParallel):
                raise ConfigError(
                    f"{key} is wrapped in {type(part).__name__}, which averages gradients itself: "
                    "track the plain module (its gradients are summed here), or use fully_shard"
                )
