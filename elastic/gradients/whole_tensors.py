"""Updates of sharded parameters by optimizers whose rule needs the whole tensor.

Muon orthogonalizes a matrix, Adafactor takes norms of it: on shards, the bits of such sums follow
the number of ranks. With ``exact`` every rank gathers one parameter at a time, with its gradient
and its state, makes the same update of the whole, and keeps its shards of the result.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.shards import is_reduced_by_fsdp, local_of

Update = Literal["elementwise", "whole"]

_UPDATES: Final[dict[type[Optimizer], Update]] = {
    **dict.fromkeys(
        (
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.Adamax,
            torch.optim.NAdam,
            torch.optim.RAdam,
            torch.optim.Adagrad,
            torch.optim.Adadelta,
            torch.optim.RMSprop,
            torch.optim.Rprop,
            torch.optim.ASGD,
            torch.optim.SparseAdam,
        ),
        "elementwise",
    ),
    torch.optim.Muon: "whole",
    torch.optim.Adafactor: "whole",
}


def declare_optimizer(kind: type[Optimizer], update: Update) -> None:
    """Say how an optimizer's update depends on a tensor; ``exact`` needs it for sharded parameters.

    ``"elementwise"``: that of an element depends on this element's parameter, gradient and state
    alone (Adam, Lion). ``"whole"``: on the whole tensor, but on no other tensor (Shampoo, SOAP,
    LAMB). torch's own optimizers need no declaration. An optimizer whose update of a tensor depends
    on others (a norm over all gradients) is neither. Raises ``ConfigError`` for anything else.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigError(f"declare_optimizer: {kind!r} is no class of optimizers")
    if update not in ("elementwise", "whole"):
        raise ConfigError(f'declare_optimizer: update={update!r}: give "elementwise" or "whole"')
    _UPDATES[kind] = update


@contextmanager
def whole_updates(optimizers: Iterable[object], *, exact: Exact) -> Iterator[None]:
    """Within, steps of ``optimizers`` update sharded parameters as wholes if their rule needs that.

    Collective over the parameters' meshes. Raises ``ConfigError`` with ``exact`` if one of them has
    sharded parameters and its rule is not known.
    """
    steps = [_WholeStep(each) for each in map(_innermost, optimizers) if exact and _is_whole(each)]
    try:
        yield
        for step in steps:
            step.end()
    finally:
        for step in steps:
            step.close()


def _is_whole(optimizer: object) -> TypeGuard[Optimizer]:
    """Return whether an optimizer has sharded parameters that it must update as wholes."""
    if not any(is_reduced_by_fsdp(p) for p in _parameters(optimizer)):
        return False
    if (update := _update_of(optimizer)) is None:
        name = type(optimizer).__name__
        raise ConfigError(
            f"exact: {name} steps parameters that the data-parallel ranks shard, and it is not "
            "known whether its update of an element needs the rest of the tensor: call "
            f'holdfast.declare_optimizer({name}, "elementwise") if it needs nothing else, or '
            '"whole" if it needs that tensor and no other; if it needs other tensors too, leave '
            "out fully_shard, or set exact=None"
        )
    return update == "whole"


def _innermost(optimizer: object) -> object:
    """Return the optimizer that a wrapper such as Accelerate's steps."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _parameters(optimizer: object) -> Iterator[torch.Tensor]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def _update_of(optimizer: object) -> Update | None:
    """Return how the optimizer that defines this one's ``step`` updates."""
    step = _plain_step(type(optimizer))
    known = {_plain_step(kind): update for kind, update in _UPDATES.items()}
    return known.get(step)


def _plain_step(kind: type) -> Callable[..., Any]:
    """Return an optimizer's ``step`` without the hooks that torch wraps around it."""
    step: Callable[..., Any] = inspect.unwrap(getattr(kind, "step"))  # noqa: B009
    return step


class _WholeStep:
    """One step of an optimizer, made by a hook before torch's own step.

    That one then meets only the parameters that are not sharded, and runs its hooks once.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._step = _plain_step(type(optimizer))
        self._groups: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._handle = optimizer.register_step_pre_hook(self._make)

    @torch.no_grad()
    def _make(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Update every sharded parameter that has a gradient, and drop the gradient."""
        groups, states = optimizer.param_groups, optimizer.state
        try:
            for group in groups:
                before, used = dict(group), dict(group)
                for parameter in group["params"]:
                    if parameter.grad is not None and is_reduced_by_fsdp(parameter):
                        used = self._update(optimizer, parameter, states[parameter], before)
                        parameter.grad = None
                self._groups.append((group, before, used))
        finally:
            optimizer.param_groups, optimizer.state = groups, states

    def _update(
        self,
        optimizer: Optimizer,
        parameter: DTensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> dict[str, Any]:
        """Update a parameter and its state; return the group as the step left it."""
        assert parameter.grad is not None
        whole = nn.Parameter(_gathered(parameter.detach()))
        whole.grad = _gathered(parameter.grad)
        used = {**group, "params": [whole]}
        optimizer.param_groups = [used]
        optimizer.state = defaultdict(dict, {whole: {k: _gathered(v) for k, v in state.items()}})
        self._step(optimizer)
        _keep(parameter.detach(), whole.detach())
        after = optimizer.state[whole]
        for key in state.keys() - after.keys():
            del state[key]
        for key, value in after.items():
            state[key] = _kept(state.get(key), value, parameter)
        return used

    def end(self) -> None:
        """Store what the step wrote to its groups, such as a count of steps."""
        for group, before, used in self._groups:
            for key, value in used.items():
                if key != "params" and (key not in before or value is not before[key]):
                    group[key] = value

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()


def _gathered(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _sharded(whole: torch.Tensor, like: DTensor) -> DTensor:
    """Return a tensor that every rank has whole with the placements of ``like``."""
    replicated = _replicated(whole, like)
    return replicated.redistribute(placements=like.placements)


def _replicated(whole: torch.Tensor, like: DTensor) -> DTensor:
    everywhere = [Replicate()] * like.device_mesh.ndim
    return DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False)


def _keep(into: torch.Tensor, whole: torch.Tensor) -> None:
    """Write this rank's part of a whole tensor into ``into``, in place."""
    assert isinstance(into, DTensor)
    local_of(into).copy_(local_of(_sharded(whole, into)))


def _kept(before: Any, value: Any, parameter: DTensor) -> Any:
    """Return a state to keep: the one before, in place, or one placed as torch's would be.

    A state of the parameter's shape is sharded like it, another one is whole on every rank.
    """
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    if isinstance(before, DTensor) and (before.shape, before.dtype) == (value.shape, value.dtype):
        _keep(before, value)
        return before
    placed = _sharded if value.shape == parameter.shape else _replicated
    return placed(value, parameter)
