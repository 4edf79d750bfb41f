"""Optimizer state by parameter name: taking it apart, and putting it into another optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt import dtypes, plain
from ckpt.errors import StateError
from ckpt.layout import TensorSpec
from ckpt.types import Json

HOW_NOT_WHAT = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Keys of a param group that are not restored: they choose an implementation, not a result."""


Setter = Callable[[Any], None]


@dataclass(slots=True, kw_only=True)
class OptimizerParts:
    """An optimizer with its parameters' names: per group, (FQN, parameter) in order.

    ``keys`` are the state keys that belong to it: tensors and plain values.
    """

    name: str
    optimizer: Optimizer
    groups: list[list[tuple[str, torch.Tensor]]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)


class _AddTensor(Protocol):
    def __call__(self, name: str, tensor: torch.Tensor, *, volatile: bool) -> str: ...


def flatten_optimizer(
    name: str,
    optimizer: Optimizer,
    *,
    names: Mapping[int, str],
    tensor: _AddTensor,
    value: Callable[[str, Json, Setter], None],
) -> OptimizerParts:
    """Name an optimizer's state by its parameters; ``names`` maps their ``id`` to their FQN."""
    parts = OptimizerParts(name=name, optimizer=optimizer)
    for i, group in enumerate(optimizer.param_groups):
        members = [
            (
                _parameter_name(name, parameter, names=names, place=f"group {i}, position {j}"),
                parameter,
            )
            for j, parameter in enumerate(group["params"])
        ]
        parts.groups.append(members)
        prefix = f"{name}.groups.{i}"
        _add(parts, f"{prefix}.params", [fqn for fqn, _ in members], value=value)
        for key, hyper in group.items():
            if key != "params":
                number = (
                    hyper.item() if isinstance(hyper, torch.Tensor) and hyper.ndim == 0 else hyper
                )
                _add(parts, f"{prefix}.{key}", number, value=value)
    known = {id(parameter): fqn for fqn, parameter in parameters(parts)}
    for parameter, state in optimizer.state.items():
        if id(parameter) not in known:
            raise StateError(
                f"{name}.state: an entry belongs to no parameter of the optimizer; "
                "keep it in an object with state_dict() of your own"
            )
        prefix = f"{name}.state.{known[id(parameter)]}"
        for key, item in state.items():
            _check_key(prefix, key)
            if isinstance(item, torch.Tensor):
                tensor(f"{prefix}.{key}", item, volatile=False)
                parts.keys.add(f"{prefix}.{key}")
            else:
                _add(parts, f"{prefix}.{key}", item, value=value)
    return parts


def parameters(parts: OptimizerParts) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (FQN, parameter) over all groups."""
    for members in parts.groups:
        yield from members


def _add(
    parts: OptimizerParts, key: str, item: Any, *, value: Callable[[str, Json, Setter], None]
) -> None:
    value(key, plain.encode(item, key), _restored_with_the_optimizer)
    parts.keys.add(key)


def _restored_with_the_optimizer(_: Any) -> None:
    """Do nothing: `Attachment.apply` restores the optimizer as a whole."""


def _parameter_name(
    name: str, parameter: torch.Tensor, *, names: Mapping[int, str], place: str
) -> str:
    fqn = names.get(id(parameter))
    if fqn is None:
        raise StateError(
            f"{name}: the parameter at {place} (shape {tuple(parameter.shape)}) belongs to no "
            "module of the state; add the module that owns it to the same state mapping"
        )
    return fqn


def _check_key(prefix: str, key: object) -> None:
    if not isinstance(key, str) or not key or "." in key:
        raise StateError(f"{prefix}: state key {key!r} is not a simple name; use one without dots")


@dataclass(slots=True, kw_only=True)
class Attachment:
    """What putting a saved optimizer into a live one will do; nothing is done before ``apply``.

    ``targets`` pairs the saved FQN of each state tensor with the tensor that receives it.
    """

    optimizer: Optimizer
    targets: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    states: list[tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=list)
    hypers: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def apply(self) -> None:
        """Give the optimizer exactly the saved state; drop state the saved one did not have."""
        for parameter, state in self.states:
            if state:
                self.optimizer.state[parameter] = state
            else:
                self.optimizer.state.pop(parameter, None)
        for group, hypers in self.hypers:
            for key, item in hypers.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(item)
                else:
                    group[key] = item


def attach(
    parts: OptimizerParts,
    *,
    specs: Mapping[str, TensorSpec],
    values: Mapping[str, Json],
    names_of: Callable[[str], Sequence[str]],
) -> Attachment:
    """Match a saved optimizer of the same name with a live one by parameter names.

    ``names_of(fqn)`` lists the names a live parameter may have been saved under.
    """
    saved = _SavedOptimizer(parts.name, specs=specs, values=values)
    found = Attachment(optimizer=parts.optimizer)
    if not saved.groups:
        found.problems.append(f"missing: {parts.name} (no optimizer of that name was saved)")
        return found
    used: set[str] = set()
    for members, group in zip(parts.groups, parts.optimizer.param_groups, strict=True):
        origins = set()
        for fqn, parameter in members:
            candidates = [name for name in names_of(fqn) if name in saved.group_of]
            if not candidates:
                found.problems.append(f"missing: {parts.name} has no state for parameter {fqn}")
                continue
            used.add(candidates[0])
            origins.add(saved.group_of[candidates[0]])
            items = saved.states.get(candidates[0], {})
            state = _fill(found, items, parameter, group=group)
            found.states.append((parameter, state))
        if len(origins) > 1:
            found.problems.append(
                f"differs: {parts.name}: one group has parameters of saved groups {sorted(origins)}"
            )
        elif origins:
            hypers = saved.groups[origins.pop()]
            found.hypers.append((group, {k: v for k, v in hypers.items() if k not in HOW_NOT_WHAT}))
    for fqn in sorted(saved.group_of.keys() - used):
        found.problems.append(f"extra: {parts.name} was saved with parameter {fqn}")
    return found


class _SavedOptimizer:
    """The saved keys of one optimizer, sorted by group and by parameter."""

    def __init__(
        self, name: str, *, specs: Mapping[str, TensorSpec], values: Mapping[str, Json]
    ) -> None:
        self.groups: dict[int, dict[str, Any]] = {}
        self.states: dict[str, dict[str, TensorSpec | Any]] = {}
        groups, states = f"{name}.groups.", f"{name}.state."
        for key, value in values.items():
            if key.startswith(groups):
                number, _, hyper = key.removeprefix(groups).partition(".")
                self.groups.setdefault(int(number), {})[hyper] = plain.decode(value)
            elif key.startswith(states):
                fqn, _, item = key.removeprefix(states).rpartition(".")
                self.states.setdefault(fqn, {})[item] = plain.decode(value)
        for key, spec in specs.items():
            if key.startswith(states):
                fqn, _, item = key.removeprefix(states).rpartition(".")
                self.states.setdefault(fqn, {})[item] = spec
        self.group_of = {
            fqn: number for number, group in self.groups.items() for fqn in group.get("params", ())
        }


def _fill(
    found: Attachment,
    saved: Mapping[str, TensorSpec | Any],
    parameter: torch.Tensor,
    *,
    group: Mapping[str, Any],
) -> dict[str, Any]:
    live = found.optimizer.state.get(parameter, {})
    on_device = bool(group.get("capturable") or group.get("fused"))
    state: dict[str, Any] = {}
    for key, item in saved.items():
        if not isinstance(item, TensorSpec):
            state[key] = item
            continue
        target = live.get(key)
        if not _fits(target, item):
            target = new_state(item, parameter, scalars_on_device=on_device)
        if target is None:
            found.problems.append(
                f"differs: {item.fqn} has shape {item.shape}, its sharded parameter "
                f"{tuple(parameter.shape)}: take one optimizer step before restoring"
            )
            continue
        state[key] = target
        found.targets.append((item.fqn, target))
    return state


def _fits(target: object, spec: TensorSpec) -> bool:
    return (
        isinstance(target, torch.Tensor)
        and tuple(target.shape) == spec.shape
        and dtypes.NAME_OF.get(target.dtype) == spec.dtype
    )


def new_state(
    spec: TensorSpec, parameter: torch.Tensor, *, scalars_on_device: bool
) -> torch.Tensor | None:
    """Return an empty tensor for a state of ``parameter``, placed as the parameter is.

    Scalars (``step``) are plain tensors, on the CPU where not asked otherwise. None: the shape
    differs from that of a sharded parameter, so its placement cannot be known.
    """
    dtype = dtypes.BY_NAME[spec.dtype]
    if not spec.shape:
        device = parameter.device if scalars_on_device else torch.device("cpu")
        return torch.empty((), dtype=dtype, device=device)
    if tuple(parameter.shape) == spec.shape:
        return empty_like(parameter, dtype=dtype)
    if isinstance(parameter, DTensor):
        return None
    return torch.empty(spec.shape, dtype=dtype, device=parameter.device)


def empty_like(tensor: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialised memory with the shape and placement of ``tensor``; no communication."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor.detach(), dtype=dtype)
    local = torch.empty_like(tensor._local_tensor.detach(), dtype=dtype)
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
