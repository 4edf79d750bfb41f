"""Hooks that round every microbatch's gradient to its parameter's grid before it is added."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from holdfast.ckpt.state.names import clean
from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError, NotFiniteError
from holdfast.elastic.gradients.exact import (
    FLOAT32,
    INT64,
    MIN_EXPONENT,
    Method,
    exponent_above,
    method_for,
    next_bound,
    round_to_grid,
)
from holdfast.elastic.gradients.wrapped import Wrapped
from holdfast.elastic.groups.shards import is_reduced_by_fsdp, local_of, settled, with_local


@dataclass(slots=True)
class _Hooked:
    """A parameter with a hook, and the hook's record of the pass."""

    parameter: weakref.ref[nn.Parameter]
    method: Method
    grid: int
    peak: torch.Tensor
    fired: int = 0
    total: torch.Tensor | None = None


class Rounding:
    """Makes the gradients of one pass add up exactly, and checks that they kept their bounds.

    ``bounds`` maps a parameter's name to the exponent of the bound that its microbatch gradients
    are assumed to keep. It is state of the run and is updated in place. Gradients whose sum
    ``.grad`` cannot hold exactly are taken out of it and added up in a separate total: see
    `take_total`.
    """

    def __init__(
        self,
        wrapped: Wrapped,
        *,
        exact: Exact,
        terms: int,
        bounds: dict[str, int],
        check: Callable[[], None],
    ) -> None:
        self._wrapped, self._exact, self._terms = wrapped, exact, terms
        self._bounds, self._check = bounds, check
        self._beside = INT64 if exact == "int64" else FLOAT32
        self._began = dict(bounds)
        self._wanted = 0
        self._hooked: dict[str, _Hooked] = {}
        self._beside_of: dict[FSDPModule, bool] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for prefix, shard in wrapped.shards():
            on_forward = functools.partial(self._on_forward, prefix)
            self._handles.append(cast(nn.Module, shard).register_forward_hook(on_forward))
        self._hook_plain()

    def _hook_plain(self) -> None:
        """Hook parameters that are not hooked yet; FSDP2's are hooked when they appear whole."""
        parameters = [(name, p) for name, p in self._wrapped.parameters() if p.requires_grad]
        self._wanted = len(parameters)
        for name, parameter in parameters:
            if not is_reduced_by_fsdp(parameter):
                self._hook(name, parameter)

    def _on_forward(self, prefix: str, part: nn.Module, _args: object, _output: object) -> None:
        if len(self._hooked) >= self._wanted:
            return
        for fqn, parameter in part.named_parameters():
            if not parameter.requires_grad or is_reduced_by_fsdp(parameter):
                continue
            beside = self._hook(prefix + clean(fqn), parameter)
            if beside is None or not isinstance(part, FSDPModule):
                continue
            if self._beside_of.setdefault(part, beside) != beside:
                raise ConfigError(
                    f"exact={self._exact!r}: {prefix}{clean(fqn)} is {parameter.dtype} beside "
                    "parameters of another dtype in the same fully_shard module: give them one "
                    "dtype, or call fully_shard on the modules they are in as well"
                )
            if beside:
                self._wrapped.leave_unreduced(part)

    def _hook(self, name: str, parameter: nn.Parameter) -> bool | None:
        """Hook a parameter; return whether it gets a separate total, None if it was hooked."""
        known = self._hooked.get(name)
        if known is not None and known.parameter() is parameter:
            return None
        method, beside = method_for(self._exact, _narrowest(parameter), name=name)
        hooked = _Hooked(weakref.ref(parameter), method, self._grid(name, method), _nothing())
        if beside:
            on_whole = functools.partial(self._on_whole, hooked)
            handle = parameter.register_post_accumulate_grad_hook(on_whole)  # type: ignore[no-untyped-call]
        else:
            on_gradient = functools.partial(self._on_gradient, hooked)
            handle = parameter.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        self._handles.append(handle)
        self._hooked[name] = hooked
        return beside

    def _on_gradient(self, hooked: _Hooked, gradient: torch.Tensor) -> torch.Tensor:
        gradient = self._seen(hooked, gradient)
        return with_local(gradient, round_to_grid(local_of(gradient), hooked.grid))

    def _on_whole(self, hooked: _Hooked, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            local = local_of(self._seen(hooked, gradient))
            hooked.total = hooked.method.added(hooked.total, local, hooked.grid)

    def _seen(self, hooked: _Hooked, gradient: torch.Tensor) -> torch.Tensor:
        """Record a gradient, and return it without partial placements."""
        self._check()
        hooked.fired += 1
        parameter = hooked.parameter()
        assert parameter is not None, "its gradient is being made"
        gradient = settled(gradient, parameter)
        local = local_of(gradient)
        if local.numel():
            low, high = torch.aminmax(local)
            hooked.peak = torch.maximum(hooked.peak.to(local.device), torch.maximum(-low, high))
        return gradient

    def _grid(self, name: str, method: Method) -> int:
        return method.grid(self._began.get(name, MIN_EXPONENT), terms=self._terms)

    def begin_pass(self) -> None:
        """Start a pass: drop the last one, and hook parameters that were added or unfrozen."""
        self._began = dict(self._bounds)
        self._hook_plain()
        for name, hooked in self._hooked.items():
            hooked.fired, hooked.total, hooked.peak = 0, None, _nothing()
            hooked.grid = self._grid(name, hooked.method)

    def peak(self, name: str) -> torch.Tensor:
        """Return the largest magnitude of this rank's microbatch gradients, float64."""
        hooked = self._hooked.get(name)
        return _nothing() if hooked is None else hooked.peak

    def has_total(self, name: str) -> bool:
        """Return whether this rank has a separate total of the parameter's gradients."""
        hooked = self._hooked.get(name)
        return hooked is not None and hooked.total is not None

    def take_total(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Return the total that was kept apart from ``.grad``, and drop it.

        For FSDP2's parameters it is the whole one, for others this rank's part.
        """
        hooked = self._hooked.get(name)
        if hooked is None or hooked.total is None:
            whole = parameter if is_reduced_by_fsdp(parameter) else local_of(parameter)
            return torch.zeros(whole.shape, dtype=self._beside.total, device=whole.device)
        total, hooked.total = hooked.total, None
        return total

    def mean(self, name: str, total: torch.Tensor) -> torch.Tensor:
        """Return the mean over all microbatches from the sum of all ranks' totals; may reuse it."""
        return self._beside.mean(total, self._grid(name, self._beside), terms=self._terms)

    def check_hooks(self, backwards: int) -> None:
        """Raise ``ConfigError`` if gradients bypassed the hooks, or met them too often."""
        self._wrapped.refuse_moving_buffers()
        for name, parameter in self._wrapped.parameters():
            hooked = self._hooked.get(name)
            if hooked is None and parameter.grad is not None:
                raise ConfigError(
                    f"exact={self._exact!r} cannot see the gradient of {name}: its FSDP2 module "
                    "was not entered through its forward; call the module itself, not its parts"
                )
            if hooked is not None and hooked.fired > backwards:
                raise ConfigError(
                    f"exact={self._exact!r} met {hooked.fired} gradients of {name} in {backwards} "
                    "backward passes: use non-reentrant activation checkpointing"
                )

    def judge(self, peaks: Mapping[str, float]) -> bool:
        """Update the bounds from all ranks' peaks; return whether the pass kept them.

        Raises ``NotFiniteError``, naming the parameter.
        """
        for name, peak in peaks.items():
            self._refuse_too_large(name, peak)
        above = {name: peak for name, peak in peaks.items() if peak > 2.0 ** self._bound(name)}
        for name, peak in above.items():
            highest = self._method(name).largest_peak(terms=self._terms)
            self._bounds[name] = min(exponent_above(peak) + self._beside.headroom_bits, highest)
        if above:
            return False
        for name, peak in peaks.items():
            bound = next_bound(self._bound(name), peak, headroom_bits=self._beside.headroom_bits)
            self._bounds[name] = min(bound, self._method(name).largest_peak(terms=self._terms))
        return True

    def _bound(self, name: str) -> int:
        return self._bounds.get(name, MIN_EXPONENT)

    def _method(self, name: str) -> Method:
        hooked = self._hooked.get(name)
        return self._beside if hooked is None else hooked.method

    def _refuse_too_large(self, name: str, peak: float) -> None:
        if peak == math.inf:
            raise NotFiniteError(
                f"the gradient of {name} is not finite: lower the learning rate or look at "
                "the data; a repetition would meet the same"
            )
        if exponent_above(peak) > self._method(name).largest_peak(terms=self._terms):
            raise NotFiniteError(
                f"the gradient of {name} is as large as {peak:.3g}, so that the sum of "
                f"{self._terms} may overflow: lower the learning rate, scale the loss down, or "
                'set exact="int64", whose sums do not'
            )

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _narrowest(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype that limits ``.grad``; under FSDP2 torch 2.15 gives ``.grad`` its own."""
    own: torch.dtype | None = parameter.grad_dtype
    return min(parameter.dtype, own or parameter.dtype, key=lambda dtype: dtype.itemsize)


def _nothing() -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64)
