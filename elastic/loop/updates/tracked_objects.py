"""The tracked objects by kind: the optimizers, their parameters, and what else holds a count."""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.wrapped import Parameters
from holdfast.elastic.tracked.entries import leaves_of

_MOST_OBJECTS: Final = 100_000
_SEALED: Final = (
    nn.Module,
    Optimizer,
    torch.Tensor,
    ModuleType,
    CodeType,
    BuiltinFunctionType,
    type,
    str,
    bytes,
    int,
    float,
)
"""Objects that are not searched: their state does not hold another object's."""


class TrackedObjects:
    """The tracked objects that take part in updates.

    ``parameters`` returns the parameters of the tracked modules by name.
    """

    def __init__(self, state: Mapping[str, Any], parameters: Callable[[], Parameters]) -> None:
        self._leaves = list(leaves_of(state))
        self._parameters = parameters
        self._name_of: dict[int, str] = {}
        self._optimizers = {
            id(value): (name, value) for name, value in self._leaves if isinstance(value, Optimizer)
        }
        self.refresh()

    def refresh(self) -> None:
        """Read the modules' parameters again: there may be others."""
        self._name_of = {id(parameter): name for name, parameter in self._parameters()}

    @property
    def optimizers(self) -> list[tuple[str, Optimizer]]:
        """The tracked optimizers by name."""
        return list(self._optimizers.values())

    def name(self, optimizer: object) -> str:
        """Return the name under which an optimizer is tracked; "" if it is not."""
        return self._optimizers.get(id(optimizer), ("", None))[0]

    def parameter(self, optimizer: Optimizer) -> str:
        """Return the name of the first tracked parameter that ``optimizer`` steps, or ""."""
        return next(filter(None, (self._name_of.get(id(p)) for p in parameters_of(optimizer))), "")

    def has(self, value: object) -> bool:
        """Return whether ``value`` is tracked, by itself or in an object that is."""
        return id(value) in self.reached()

    def reached(self) -> dict[int, object]:
        """Return the tracked objects and those that they hold, by id, the nearest first."""
        seen: dict[int, object] = {}
        queue = deque(value for _, value in self._leaves)
        while queue and len(seen) < _MOST_OBJECTS:
            value = queue.popleft()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            if not isinstance(value, _SEALED):
                queue += _referents(value)
        return seen

    def scalers(self) -> Iterator[GradScaler]:
        """Yield the tracked scalers that are enabled."""
        for _, value in self._leaves:
            if isinstance(value, GradScaler) and value.is_enabled():
                yield value

    def refuse_foreign(self) -> None:
        """Refuse tracked optimizers that step parameters of no tracked module."""
        for name, optimizer in self.optimizers:
            self.refuse_foreign_of(name, optimizer)

    def refuse_foreign_of(self, name: str, optimizer: Optimizer) -> None:
        """Refuse a tracked optimizer that steps parameters of no tracked module."""
        if all(id(p) in self._name_of for p in parameters_of(optimizer)):
            return
        self.refresh()
        for i, group in enumerate(optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                if id(parameter) in self._name_of or not parameter.requires_grad:
                    continue
                known = group.get("param_names") or ()
                which = known[j] if j < len(known) else f"{j} of group {i}"
                raise ConfigError(
                    f"run.track: the optimizer {name} steps a parameter of no tracked module "
                    f"(parameter {which}, shape {tuple(parameter.shape)}), so no gradient of it "
                    "is summed over the ranks: name the module that has it in run.track as well, "
                    "and make the optimizer after every wrapper of the module (a tensor by itself "
                    "goes into a torch.nn.ParameterList)"
                )


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that an optimizer steps."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _referents(value: Any) -> list[Any]:
    """Return the objects that ``value`` holds; of functions only what they closed over."""
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return [each for each in gc.get_referents(value) if not isinstance(each, type)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises for an empty cell
    except ValueError:
        return False
    return True
