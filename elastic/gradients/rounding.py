"""Hooks that round every microbatch's gradient to a grid before it is added.

The grid follows from the parameter's bound, or, for a gradient above the bound, from the gradient's
own magnitude: it then belongs to a *level*, and each level has a sum of its own. A gradient's level
depends on nothing but the gradient and the bound, so the sum of every level, and the sum of these
sums, is the same in any grouping. No pass has to be repeated on a coarser grid.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from holdfast.elastic.gradients.native import fixed_point
from holdfast.elastic.gradients.wrapped import Wrapped
from holdfast.elastic.groups.shards import is_reduced_by_fsdp, local_of, settled, with_local

LEVEL_BITS = 4
"""Distance of the grids of two levels, in bits: what a gradient above its bound may lose."""

NO_GRADIENT = -1.0
"""The peak of a parameter that had no gradient in the pass."""

Totals = dict[str, tuple[int, ...]]
"""The levels of each parameter that has sums apart from ``.grad`` on some rank, ascending."""


@dataclass(slots=True)
class _Hooked:
    """A parameter with a hook, and the hook's record of the pass.

    ``beside``: all sums are kept apart from ``.grad``. ``shape`` is that of a microbatch's gradient
    at this rank. ``totals`` has the sums that are kept apart, by level. ``room`` is memory for the
    lowest. ``held`` is a gradient that will be added together with the next one.
    """

    parameter: weakref.ref[nn.Parameter]
    method: Method
    bound: int
    beside: bool
    shape: torch.Size
    peak: float = NO_GRADIENT
    fired: int = 0
    totals: dict[int, torch.Tensor] = field(default_factory=dict)
    room: torch.Tensor | None = None
    held: torch.Tensor | None = None


class Rounding:
    """Makes the gradients of one pass add up exactly.

    ``bounds`` maps a parameter's name to the exponent of the bound that its microbatch gradients
    are expected to keep. It is state of the run and is updated in place: a larger gradient raises
    it at once, and it falls by at most half in a step. Gradients whose sum ``.grad`` cannot hold
    exactly, and those above their bound, are added up in separate totals: see `take_total`. The
    hooks act only while `active`, so `torch.autograd.grad` inside a microbatch sees none of it.
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
        self.active = False
        self._step_peaks: dict[str, float] = {}
        self._unhooked: set[str] = set()
        self._frozen: list[nn.Parameter] = []
        self._hooked: dict[str, _Hooked] = {}
        self._beside_of: dict[FSDPModule, bool] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for prefix, shard in wrapped.shards():
            on_forward = functools.partial(self._on_forward, prefix)
            self._handles.append(cast(nn.Module, shard).register_forward_hook(on_forward))
        self._hook_plain()

    def _hook_plain(self) -> None:
        """Hook parameters that are not hooked yet; FSDP2's are hooked when they appear whole."""
        parameters = self._wrapped.parameters()
        wanted = [(name, p) for name, p in parameters if p.requires_grad]
        for name, parameter in wanted:
            if not is_reduced_by_fsdp(parameter):
                self._hook(name, parameter)
        self._unhooked = {name for name, _ in wanted} - self._hooked.keys()
        self._frozen = [p for _, p in parameters if not p.requires_grad]

    def _on_forward(self, prefix: str, part: nn.Module, _args: object, _output: object) -> None:
        if not self._unhooked:
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
        hooked = _Hooked(
            weakref.ref(parameter), method, self._bound(name), beside, local_of(parameter).shape
        )
        if beside:
            on_whole = functools.partial(self._on_whole, hooked)
            handle = parameter.register_post_accumulate_grad_hook(on_whole)  # type: ignore[no-untyped-call]
        else:
            on_gradient = functools.partial(self._on_gradient, hooked)
            handle = parameter.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        self._handles.append(handle)
        self._hooked[name] = hooked
        self._unhooked.discard(name)
        return beside

    def _on_gradient(self, hooked: _Hooked, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self.active or self._is_sparse(hooked, gradient):
            return None
        gradient = self._settled(hooked, gradient)
        local, grid = local_of(gradient), self._grid(hooked, 0)
        rounded, peak = _rounded(local, grid)
        if level := self._level(hooked, peak):
            self._add(hooked, local, level)
            return with_local(gradient, torch.zeros_like(local))
        return with_local(gradient, rounded)

    def _is_sparse(self, hooked: _Hooked, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is sparse; those are added up elsewhere."""
        parameter = hooked.parameter()
        if gradient.is_sparse and parameter is not None and parameter.grad is not None:
            name = next(name for name, each in self._hooked.items() if each is hooked)
            raise ConfigError(
                f"the gradient of {name} is sparse in this microbatch and was dense in an earlier "
                "one: set sparse=False"
            )
        return gradient.is_sparse

    def _on_whole(self, hooked: _Hooked, parameter: torch.Tensor) -> None:
        if not self.active or parameter.grad is None or parameter.grad.is_sparse:
            return
        gradient, parameter.grad = parameter.grad, None
        local = local_of(self._settled(hooked, gradient))
        if hooked.method is not INT64 or not fixed_point.takes(local):
            self._add(hooked, local, self._level(hooked, _peak(local)))
        elif hooked.held is None:
            hooked.held = local
        else:
            pair, hooked.held = [hooked.held, local], None
            self._add_expected(hooked, pair)

    def _add_expected(self, hooked: _Hooked, gradients: Sequence[torch.Tensor]) -> None:
        """Add one or two gradients as ones within their bound, in one pass.

        If one is above it after all, they are taken away again, and each is added at its level.
        """
        before, grid = hooked.totals.get(0), self._grid(hooked, 0)
        added = fixed_point.add(before, gradients, grid, room=hooked.room)
        assert added is not None, "the function takes them"
        hooked.totals[0], peak = added
        if self._level(hooked, peak):
            fixed_point.take(hooked.totals[0], gradients, grid)
            if before is None:
                del hooked.totals[0]
            for gradient in gradients:
                self._add(hooked, gradient, self._level(hooked, _peak(gradient)))

    def _add(self, hooked: _Hooked, local: torch.Tensor, level: int) -> None:
        total, grid = hooked.totals.get(level), self._grid(hooked, level)
        hooked.totals[level] = hooked.method.added(total, local, grid)

    def _settled(self, hooked: _Hooked, gradient: torch.Tensor) -> torch.Tensor:
        """Count a gradient; return it without partial placements."""
        self._check()
        hooked.fired += 1
        parameter = hooked.parameter()
        assert parameter is not None, "its gradient is being made"
        return settled(gradient, parameter)

    def _level(self, hooked: _Hooked, peak: float) -> int:
        """Record the largest magnitude of a gradient; return its level."""
        if not math.isfinite(peak):
            hooked.peak = math.inf
            return 0  # the pass counts for nothing
        hooked.peak = max(hooked.peak, peak)
        return _level(peak, hooked.bound)

    def _grid(self, hooked: _Hooked, level: int) -> int:
        return hooked.method.grid(hooked.bound + LEVEL_BITS * level, terms=self._terms)

    def begin_pass(self) -> None:
        """Start a pass: drop the last one, and hook parameters that were added or unfrozen."""
        self._hook_plain()
        self._make_room()
        for name, hooked in self._hooked.items():
            hooked.fired, hooked.peak, hooked.bound = 0, NO_GRADIENT, self._bound(name)
            hooked.held = None
            hooked.totals.clear()

    def _make_room(self) -> None:
        """Give the totals of the parameters that are not FSDP2's adjacent memory, once.

        So the next pass finds its pages, and many of them are summed over ranks as one.
        """
        parameters = ((hooked, hooked.parameter()) for hooked in self._hooked.values())
        lacking = [
            hooked
            for hooked, parameter in parameters
            if hooked.room is None
            and hooked.method is INT64
            and parameter is not None
            and parameter.device.type == "cpu"
            and not is_reduced_by_fsdp(parameter)
        ]
        at, whole = 0, torch.empty(sum(h.shape.numel() for h in lacking), dtype=torch.int64)
        for hooked in lacking:
            count = hooked.shape.numel()
            hooked.room = whole[at : at + count].view(hooked.shape)
            at += count

    def begin_backward(self) -> None:
        """Act from now on; hook parameters that the script unfroze inside the pass."""
        self.active = True
        if any(p.requires_grad for p in self._frozen):
            self._hook_plain()

    def end_backwards(self) -> None:
        """Add the gradients that waited for another one."""
        for hooked in self._hooked.values():
            if (held := hooked.held) is not None:
                hooked.held = None
                self._add_expected(hooked, [held])

    def peak(self, name: str) -> float:
        """Return the largest magnitude of this rank's microbatch gradients, or `NO_GRADIENT`."""
        hooked = self._hooked.get(name)
        return NO_GRADIENT if hooked is None else hooked.peak

    def has_total(self, name: str) -> bool:
        """Return whether this rank keeps the parameter's gradients of the pass apart."""
        hooked = self._hooked.get(name)
        return hooked is not None and hooked.beside and bool(hooked.totals)

    def levels(self, peaks: Mapping[str, float]) -> Totals:
        """Return the levels above 0 that any rank may have, for all ranks' ``peaks``."""
        highest = {name: _level(peak, self._bound(name)) for name, peak in peaks.items()}
        return {name: tuple(range(1, most + 1)) for name, most in highest.items() if most}

    def has_level(self, name: str, level: int) -> bool:
        """Return whether this rank has a total of the parameter's gradients at ``level``."""
        hooked = self._hooked.get(name)
        return hooked is not None and level in hooked.totals

    def take_total(self, name: str, parameter: nn.Parameter, level: int) -> torch.Tensor:
        """Return a total that was kept apart from ``.grad``, and drop it; zeros if there is none.

        For FSDP2's parameters it is the whole one, for others this rank's part.
        """
        hooked = self._hooked.get(name)
        total = None if hooked is None else hooked.totals.pop(level, None)
        if total is not None:
            return total
        whole = parameter if is_reduced_by_fsdp(parameter) else local_of(parameter)
        shape = whole.shape if hooked is None else hooked.shape
        return torch.zeros(shape, dtype=self._method(name).total, device=whole.device)

    def mean(
        self, name: str, total: torch.Tensor, level: int, *, dtype: torch.dtype = torch.float64
    ) -> torch.Tensor:
        """Return the mean over all microbatches from the sum of all ranks' totals; may reuse it.

        Fixed point gives float64, or the float32 to which that is rounded if ``dtype`` is that.
        """
        method = self._method(name)
        grid = method.grid(self._began(name) + LEVEL_BITS * level, terms=self._terms)
        return method.mean(total, grid, terms=self._terms, dtype=dtype)

    def check_hooks(self, backwards: int) -> None:
        """Raise ``ConfigError`` if gradients bypassed the hooks, or met them too often."""
        for name, parameter in self._wrapped.parameters():
            hooked = self._hooked.get(name)
            if hooked is None and parameter.requires_grad and parameter.grad is not None:
                raise ConfigError(
                    f"exact={self._exact!r} cannot see the gradient of {name}: its FSDP2 module "
                    "was not entered through its forward; call the module itself, not its parts"
                )
            if hooked is not None and hooked.fired > backwards:
                raise ConfigError(
                    f"exact={self._exact!r} met {hooked.fired} gradients of {name} in {backwards} "
                    "backward passes: use non-reentrant activation checkpointing"
                )

    def judge(self, peaks: Mapping[str, float]) -> None:
        """Raise the bounds that all ranks' peaks exceed.

        Raises ``NotFiniteError``, naming the parameter.
        """
        for name, peak in peaks.items():
            self._refuse_too_large(name, peak)
        for name, peak in peaks.items():
            self._step_peaks[name] = max(peak, self._step_peaks.get(name, NO_GRADIENT))
            if _level(peak, self._bound(name)):
                self._bounds[name] = self._limited(
                    name, exponent_above(peak) + self._beside.headroom_bits
                )

    def end_step(self) -> None:
        """Let the bounds of the parameters that had gradients in the step fall, by at most half."""
        for name, peak in self._step_peaks.items():
            if peak != NO_GRADIENT:
                bound = next_bound(
                    self._bound(name), peak, headroom_bits=self._beside.headroom_bits
                )
                self._bounds[name] = self._limited(name, bound)
        self._step_peaks.clear()

    def _limited(self, name: str, bound: int) -> int:
        return min(bound, self._method(name).largest_peak(terms=self._terms))

    def _bound(self, name: str) -> int:
        return self._bounds.get(name, MIN_EXPONENT)

    def _began(self, name: str) -> int:
        """Return the parameter's bound at the start of the pass."""
        hooked = self._hooked.get(name)
        return self._bound(name) if hooked is None else hooked.bound

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


def _peak(values: torch.Tensor) -> float:
    """Return the largest magnitude, NaN if a number is NaN, 0 of none."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return torch.maximum(-low, high).item()


def _rounded(values: torch.Tensor, grid: int) -> tuple[torch.Tensor, float]:
    """Return ``values`` rounded to multiples of ``2**grid``, and their largest magnitude."""
    found = fixed_point.rounded(values, grid)
    return (round_to_grid(values, grid), _peak(values)) if found is None else found


def _level(peak: float, bound: int) -> int:
    """Return the level of a gradient with this largest magnitude; 0 if it keeps the bound."""
    return max(0, -(-(exponent_above(peak) - bound) // LEVEL_BITS)) if peak > 0.0 else 0
