"""The places of a state's tensors and values in a universal directory, decided from their names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.ckpt.convert.deepspeed.engine_state import (
    CLIENT,
    COUNTERS,
    ENGINE,
    KEPT_LOSS_SCALE,
    LOSS_SCALER,
    RESERVED_KEYS,
    SCHEDULER,
    SETTINGS,
)
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.layout import TensorSpec
from holdfast.ckpt.state import plain
from holdfast.ckpt.state.optimizers import HOW_NOT_WHAT
from holdfast.ckpt.types import Json

WEIGHT: Final = "fp32"
STEP: Final = "step"

_GROUP: Final = re.compile(r"(.+)\.groups\.(\d{1,6})\.params")
_SHOWN: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedState:
    """A file of a trained parameter: ``key`` is ``fp32`` or that of an optimizer's state."""

    parameter: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensor:
    """A tensor of the model states: of the module, or at ``path`` in the client state."""

    path: tuple[str, ...]
    of_module: bool


@dataclass(slots=True, kw_only=True)
class UniversalPlan:
    """The places of all tensors by name, and the plain values of the engine.

    ``groups`` are the names of the trained parameters of each group, ``settings`` the groups'
    hyperparameters. ``steps`` are optimizer steps that are plain values.
    """

    places: dict[str, TrainedState | KeptTensor] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    module_values: dict[str, Any] = field(default_factory=dict)
    client: dict[tuple[str, ...], Any] = field(default_factory=dict)
    scheduler: Any = None
    clip_grad: Any = None


def plan_universal(
    specs: Mapping[str, TensorSpec], *, aliases: Mapping[str, str], values: Mapping[str, Json]
) -> UniversalPlan:
    """Return the plan for a state with one module and its optimizer.

    Raises ``MismatchError`` for a state that a DeepSpeed engine cannot have.
    """
    return _UniversalPlanner(specs, aliases, values).plan()


class _UniversalPlanner:
    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        aliases: Mapping[str, str],
        values: Mapping[str, Json],
    ) -> None:
        self._specs, self._aliases = specs, aliases
        self._values = {n: v for n, v in values.items() if not _of_one_rank(v)}
        self._found = UniversalPlan()

    def plan(self) -> UniversalPlan:
        self._optimizer = self._only_optimizer()
        members = self._members()
        self._module = self._only_module([name for group in members for name in group])
        states = self._states({name for group in members for name in group})
        for number, group in enumerate(members):
            trained = [name for name in group if name in states]
            self._found.groups.append([self._bare(name) for name in trained])
            self._found.settings.append(self._settings(number))
        for name, keys in states.items():
            self._place_trained(name, keys)
        self._check_keys(states)
        self._place_rest()
        self._place_values()
        return self._found

    def _only_optimizer(self) -> str:
        names = sorted({match[1] for name in self._values if (match := _GROUP.fullmatch(name))})
        if len(names) != 1:
            raise MismatchError(
                f"ds-universal: the state has the optimizers {', '.join(names) or 'none'}; a "
                "DeepSpeed engine has one. Choose it and its module with --select"
            )
        return names[0]

    def _members(self) -> list[list[str]]:
        """Return the stored names of the parameters of each group."""
        groups: dict[int, list[str]] = {}
        for name, listed in self._values.items():
            if (match := _GROUP.fullmatch(name)) and match[1] == self._optimizer:
                stored = [self._aliases.get(each, each) for each in listed]
                groups[int(match[2])] = list(dict.fromkeys(stored))
        if sorted(groups) != list(range(len(groups))):
            raise MismatchError(f"ds-universal: {self._optimizer} has the groups {sorted(groups)}")
        lost = [n for group in groups.values() for n in group if n not in self._specs]
        if lost:
            raise MismatchError(
                f"ds-universal: {', '.join(lost[:_SHOWN])} ({len(lost)} parameters of "
                f"{self._optimizer}) are not among the tensors; select them too"
            )
        return [groups[number] for number in sorted(groups)]

    def _only_module(self, parameters: Sequence[str]) -> str:
        modules = sorted({name.partition(".")[0] for name in parameters})
        if len(modules) != 1:
            raise MismatchError(
                f"ds-universal: {self._optimizer} has parameters of {', '.join(modules) or 'no'} "
                "modules; a DeepSpeed engine has one module"
            )
        return modules[0]

    def _bare(self, name: str) -> str:
        """Return a name as it is in the module, which becomes the name of a folder."""
        bare = name.partition(".")[2]
        if not bare or "/" in bare or "\0" in bare or bare in (".", ".."):
            raise MismatchError(
                f"ds-universal: {name!r} cannot be the name of a folder; rename the parameter"
            )
        return bare

    def _states(self, members: set[str]) -> dict[str, dict[str, str]]:
        """Return the tensors of each parameter's state: key to name. Plain steps are kept."""
        start, found = f"{self._optimizer}.state.", dict[str, dict[str, str]]()
        for name in [n for n in (*self._specs, *self._values) if n.startswith(start)]:
            parameter, _, key = name.removeprefix(start).rpartition(".")
            parameter = self._aliases.get(parameter, parameter)
            if parameter not in members:
                raise MismatchError(
                    f"ds-universal: {name} belongs to no parameter of a group of {self._optimizer}"
                )
            states = found.setdefault(parameter, {})
            if name in self._specs:
                states[key] = name
            elif key == STEP:
                self._found.steps[self._bare(parameter)] = plain.decode(self._values[name])
            elif self._values[name] is not None:
                raise MismatchError(
                    f"ds-universal: {name} is {self._values[name]!r}; DeepSpeed keeps tensors "
                    "and a step only"
                )
        if not found:
            raise MismatchError(
                f"ds-universal: {self._optimizer} has no state yet, and a universal directory "
                "needs it; save after the first step"
            )
        return found

    def _place_trained(self, name: str, keys: Mapping[str, str]) -> None:
        bare, spec = self._bare(name), self._specs[name]
        if spec.dtype != "float32":
            raise MismatchError(
                f"ds-universal: {name} is {spec.dtype}; DeepSpeed keeps 32-bit weights of trained "
                "parameters. Train with 32-bit weights, or call model.float() and save again"
            )
        self._found.shapes[bare] = spec.shape
        self._found.places[name] = TrainedState(parameter=bare, key=WEIGHT)
        for key, at in keys.items():
            shape = self._specs[at].shape
            if shape != (() if key == STEP else spec.shape) or key == WEIGHT:
                raise MismatchError(
                    f"ds-universal: {at} has the shape {list(shape)}, {name} {list(spec.shape)}; "
                    "DeepSpeed partitions states that are shaped as their parameters"
                )
            self._found.places[at] = TrainedState(parameter=bare, key=key)

    def _check_keys(self, states: Mapping[str, Mapping[str, str]]) -> None:
        first = next(iter(states))
        for name, keys in states.items():
            if keys.keys() != states[first].keys():
                raise MismatchError(
                    f"ds-universal: {name} has the state {', '.join(keys) or 'none'}, {first} has "
                    f"{', '.join(states[first]) or 'none'}; a DeepSpeed engine keeps the same "
                    "for all"
                )

    def _settings(self, number: int) -> dict[str, Any]:
        start = f"{self._optimizer}.groups.{number}."
        return {
            name.removeprefix(start): plain.decode(value)
            for name, value in self._values.items()
            if name.startswith(start) and name.removeprefix(start) not in HOW_NOT_WHAT
        }

    def _place_rest(self) -> None:
        """Place frozen parameters and buffers, and the tensors of the client state."""
        module = f"{self._module}."
        for name in self._specs:
            if name in self._found.places:
                continue
            of_module = name.startswith(module)
            path = (name.removeprefix(module),) if of_module else self._client_path(name)
            self._found.places[name] = KeptTensor(path=path, of_module=of_module)
        for name, stored in self._aliases.items():
            if name.startswith(module) and stored.startswith(module):
                self._found.shared[name.removeprefix(module)] = stored.removeprefix(module)
            else:
                raise MismatchError(
                    f"ds-universal: {name} is tied to {stored}, outside of the module "
                    f"{self._module}; leave it out with --select"
                )

    def _client_path(self, name: str) -> tuple[str, ...]:
        path = tuple(name.removeprefix(f"{CLIENT}.").split("."))
        if path[0] in RESERVED_KEYS:
            raise MismatchError(
                f"ds-universal: DeepSpeed has another meaning for the client state {path[0]!r}; "
                f"rename {name}"
            )
        return path

    def _place_values(self) -> None:
        scheduler = self._scheduler()
        for name, value in self._values.items():
            if name.startswith((f"{self._optimizer}.groups.", f"{self._optimizer}.state.")):
                continue
            if name == scheduler:
                self._found.scheduler = plain.decode(value)
            elif name.startswith(f"{ENGINE}."):
                self._place_setting(name.removeprefix(f"{ENGINE}."), plain.decode(value))
            elif name.startswith(f"{self._module}."):
                bare = name.removeprefix(f"{self._module}.")
                self._found.module_values[bare] = plain.decode(value)
            else:
                self._found.client[self._client_path(name)] = plain.decode(value)

    def _scheduler(self) -> str | None:
        if SCHEDULER in self._values:
            return SCHEDULER
        names = [n for n, value in self._values.items() if "last_epoch" in _keys_of(value)]
        if len(names) > 1:
            raise MismatchError(
                f"ds-universal: {', '.join(names)} are schedulers; a DeepSpeed engine has one. "
                f"Name it {SCHEDULER}"
            )
        return names[0] if names else None

    def _place_setting(self, key: str, item: Any) -> None:
        if key == LOSS_SCALER:
            self._found.client[KEPT_LOSS_SCALE,] = item
        elif key == "clip_grad":
            self._found.clip_grad = item
        elif key in COUNTERS or key in SETTINGS:
            self._found.engine[key] = item


def _keys_of(value: Json) -> Iterator[object]:
    if isinstance(value, dict):
        pairs = value.get("$map") if value.keys() == {"$map"} else value.items()
        yield from (pair[0] for pair in pairs or ())


def _of_one_rank(value: Json) -> bool:
    """Say whether a value belongs to one rank, or holds one that does."""
    if isinstance(value, list):
        return any(map(_of_one_rank, value))
    if not isinstance(value, dict):
        return False
    return value.keys() == {"$rank"} or any(map(_of_one_rank, value.values()))
