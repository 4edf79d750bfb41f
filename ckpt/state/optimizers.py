"""Optimizer state by parameter name: take it apart, and attach it to another optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.geometry.layout import TensorSpec
from holdfast.ckpt.state import plain, torch_dtypes
from holdfast.ckpt.state.local_boxes import (
    FlatShard,
    Leaf,
    empty_like,
    like,
    local_of,
    overlaps_itself,
)
from holdfast.ckpt.state.trees.encoding import REFERENCES, TreeEncoder, stored_names
from holdfast.ckpt.types import Json

HOW_NOT_WHAT = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Keys of a param group that are not restored: they choose an implementation, not a result."""


Setter = Callable[[Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatWindow:
    """A parameter that is a part of a larger flat one: ``part`` lies from element ``at`` on."""

    at: int
    part: FlatShard

    def of(self, fqn: str, flat: torch.Tensor, state: torch.Tensor) -> Leaf:
        """Return this parameter's part of ``state``, a state of the flat parameter ``flat``."""
        if state.ndim == 0:
            return state
        if state.shape != flat.shape:
            raise StateError(
                f"{fqn}: a state of shape {list(state.shape)} for a flat parameter of "
                f"{list(flat.shape)}: whose it is cannot be known; use use_orig_params=True"
            )
        mine = state[self.at : self.at + self.part.tensor.numel()]
        return FlatShard(mine, shape=self.part.shape, start=self.part.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizedParameter:
    """A named parameter, the tensor that the optimizer has for it, and its placement.

    ``parameter`` is the optimizer's own tensor. Several members share it where they are windows of
    one flat parameter.
    """

    fqn: str
    parameter: torch.Tensor
    leaf: Leaf
    window: FlatWindow | None = None

    def place(self, fqn: str, state: torch.Tensor) -> Leaf:
        """Return ``state``, a state of ``parameter``, as this member's part.

        Raises ``StateError``.
        """
        if self.window is not None:
            return self.window.of(fqn, self.parameter, state)
        return like(fqn, self.leaf, state)


@dataclass(slots=True, kw_only=True)
class OptimizerParts:
    """An optimizer with its parameters' names: the members of each group, in order.

    ``keys`` are the keys of the state that belong to it, of tensors and of plain values. ``nests``
    says whether a parameter's state has tensors inside lists or dicts.
    """

    name: str
    optimizer: Optimizer
    groups: list[list[OptimizedParameter]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    nests: bool = False

    def described(self, values: Mapping[str, Json]) -> Iterator[tuple[str, dict[str, Json]]]:
        """Yield each group's key with its parameters and settings, for comparison between ranks."""
        for i, group in enumerate(self.optimizer.param_groups):
            key = f"{self.name}.groups.{i}"
            kept = {h: values[f"{key}.{h}"] for h in group if h not in HOW_NOT_WHAT}
            yield key, {"params": values[f"{key}.params"], "hypers": kept}


def merge_groups(offers: Sequence[Mapping[str, Mapping[str, Json]]]) -> dict[str, list[str]]:
    """Return the parameters of each group over all ranks, by the key ``<group>.params``.

    Raises ``StateError`` if a group has other settings at another rank.
    """
    members: dict[str, dict[str, None]] = {}
    first: dict[str, tuple[int, Mapping[str, Json]]] = {}
    for rank, offer in enumerate(offers):
        for key, group in offer.items():
            before, hypers = first.setdefault(key, (rank, group["hypers"]))
            for name in sorted(hypers.keys() | group["hypers"].keys()):
                old, new = (h.get(name) for h in (hypers, group["hypers"]))
                if old != new:
                    raise StateError(
                        f"{key}.{name}: {old!r} at rank {before}, {new!r} at rank {rank}; give the "
                        "optimizers of all ranks the same groups with the same settings, in the "
                        "same order (a group may be empty at a rank)"
                    )
            members.setdefault(f"{key}.params", {}).update(dict.fromkeys(group["params"]))
    return {key: list(names) for key, names in members.items()}


class _AddTensor(Protocol):
    def __call__(self, name: str, tensor: Leaf, *, volatile: bool) -> str: ...


def flatten_optimizer(
    name: str,
    optimizer: Optimizer,
    *,
    members: Callable[[torch.Tensor], list[OptimizedParameter]],
    tensor: _AddTensor,
    value: Callable[[str, Json, Setter], None],
) -> OptimizerParts:
    """Name an optimizer's state by its parameters; ``members`` gives the names of a parameter."""
    parts = OptimizerParts(name=name, optimizer=optimizer)
    known: dict[int, list[OptimizedParameter]] = {}
    for i, group in enumerate(optimizer.param_groups):
        prefix, found = f"{name}.groups.{i}", []
        for j, parameter in enumerate(group["params"]):
            who = known[id(parameter)] = members(parameter)
            if not who:
                raise StateError(
                    f"{name}: the parameter at group {i}, position {j} (shape "
                    f"{tuple(parameter.shape)}) belongs to no module of the state; add the module "
                    "that owns it to the same state mapping"
                )
            found += who
        parts.groups.append(found)
        _add(parts, f"{prefix}.params", [member.fqn for member in found], value=value)
        for key, hyper in group.items():
            if key != "params":
                scalar = isinstance(hyper, torch.Tensor) and hyper.ndim == 0
                _add(parts, f"{prefix}.{key}", hyper.item() if scalar else hyper, value=value)
    for parameter, state in optimizer.state.items():
        if id(parameter) not in known:
            raise StateError(
                f"{name}.state: an entry belongs to no parameter of the optimizer; "
                "keep it in an object with state_dict() of your own"
            )
        for member in known[id(parameter)]:
            _flatten_state(parts, member, state, tensor=tensor, value=value)
    return parts


def _flatten_state(
    parts: OptimizerParts,
    member: OptimizedParameter,
    state: Mapping[str, Any],
    *,
    tensor: _AddTensor,
    value: Callable[[str, Json, Setter], None],
) -> None:
    prefix = state_prefix(parts.name, member.fqn)
    for key, item in state.items():
        if not isinstance(key, str) or not key or "." in key:
            raise StateError(
                f"{prefix[:-1]}: state key {key!r} is not a simple name; use one without dots"
            )
        if isinstance(item, torch.Tensor):
            tensor(prefix + key, member.place(prefix + key, item), volatile=False)
            parts.keys.add(prefix + key)
        elif plain.is_plain(item):
            _add(parts, prefix + key, item, value=value)
        else:
            _add_tree(parts, member, prefix + key, item, tensor=tensor, value=value)


def _add_tree(
    parts: OptimizerParts,
    member: OptimizedParameter,
    key: str,
    item: Any,
    *,
    tensor: _AddTensor,
    value: Callable[[str, Json, Setter], None],
) -> None:
    """Add a list or a dict with tensors in it, each placed as the parameter is."""
    if member.window is not None:
        raise StateError(
            f"{key}: tensors in a {type(item).__name__}, for a parameter that FSDP has flattened: "
            "whose they are cannot be known; use use_orig_params=True"
        )

    def take(path: str, leaf: Leaf, *, own: bool) -> str:
        if own:
            raise StateError(f"{path}: optimizer state belongs to all ranks; take PerRank away")
        placed = member.place(path, leaf) if isinstance(leaf, torch.Tensor) else leaf
        parts.keys.add(path)
        return tensor(path, placed, volatile=False)

    encoder = TreeEncoder(rank=0, take=take)
    value(key, encoder.encode(item, key), _restored_with_the_optimizer)
    parts.keys.add(key)
    parts.nests = True


def state_prefix(name: str, fqn: str) -> str:
    """Return the prefix of the keys of a parameter's state."""
    return f"{name}.state.{fqn}."


def _add(
    parts: OptimizerParts, key: str, item: Any, *, value: Callable[[str, Json, Setter], None]
) -> None:
    value(key, plain.encode(item, key, leaf=_refuse_setting), _restored_with_the_optimizer)
    parts.keys.add(key)


def _refuse_setting(path: str, item: object) -> Json:
    if isinstance(item, torch.Tensor):
        raise StateError(
            f"{path}: a tensor of shape {list(item.shape)} inside a setting of a group; a setting "
            "may be a scalar tensor, a number, or a container of numbers: keep tensors in the "
            "state of a parameter"
        )
    return plain.refuse(path, item)


def _restored_with_the_optimizer(_: Any) -> None:
    """Do nothing: `Attachment.apply` restores the optimizer as a whole."""


@dataclass(slots=True, kw_only=True)
class Attachment:
    """A plan that puts a saved optimizer into a live one; nothing changes before ``apply``.

    ``targets`` pairs the saved FQN of each state tensor with the tensor that receives it. ``alike``
    are saved scalars that must be equal, because one live tensor receives all of them. ``missing``
    and ``extra`` are keys (of a parameter's state, or the optimizer's name); ``differs`` are
    sentences.
    """

    optimizer: Optimizer
    targets: list[tuple[str, Leaf]] = field(default_factory=list)
    states: list[tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=list)
    hypers: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    alike: list[tuple[str, ...]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def apply(self) -> None:
        """Give the optimizer exactly the saved state; drop any state that was not saved."""
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


@dataclass(frozen=True, slots=True)
class _SavedTree:
    """A saved list or dict with tensors in it, as JSON."""

    tree: Json


class SavedOptimizer:
    """The saved keys of one optimizer, sorted by group and by parameter.

    ``states`` has per parameter the plain values, trees and the specs of the tensors that were
    saved with it. ``nested`` are the specs of the tensors in trees, by name.
    """

    def __init__(
        self, name: str, *, specs: Mapping[str, TensorSpec], values: Mapping[str, Json]
    ) -> None:
        self.groups: dict[int, dict[str, Any]] = {}
        self.states: dict[str, dict[str, TensorSpec | _SavedTree | Any]] = {}
        self.nested: dict[str, TensorSpec] = {}
        groups, states = f"{name}.groups.", f"{name}.state."
        for key, value in values.items():
            if key.startswith(groups):
                number, _, hyper = key.removeprefix(groups).partition(".")
                self.groups.setdefault(int(number), {})[hyper] = plain.decode(value)
            elif key.startswith(states):
                fqn, _, item = key.removeprefix(states).rpartition(".")
                inside = {name: specs[name] for name in stored_names(value) if name in specs}
                self.nested |= inside
                found = _SavedTree(value) if inside else plain.decode(value)
                self.states.setdefault(fqn, {})[item] = found
        for key, spec in specs.items():
            if key.startswith(states) and key not in self.nested:
                fqn, _, item = key.removeprefix(states).rpartition(".")
                self.states.setdefault(fqn, {})[item] = spec
        self.group_of = {
            fqn: number for number, group in self.groups.items() for fqn in group.get("params", ())
        }


def attach(
    parts: OptimizerParts,
    saved: SavedOptimizer,
    *,
    names_of: Callable[[str], Sequence[str]],
    chosen: Callable[[str], bool],
) -> Attachment:
    """Match a saved optimizer with the live one of the same name, by parameter names.

    ``names_of(fqn)`` lists the names under which a live parameter may have been saved. Keys that
    are not ``chosen`` keep their live state.
    """
    found = Attachment(optimizer=parts.optimizer)
    if not saved.groups:
        if any(chosen(key) for key in _keys(parts)):
            found.missing.append(parts.name)
        return found
    for i, (members, group) in enumerate(
        zip(parts.groups, parts.optimizer.param_groups, strict=True)
    ):
        origins = {i} & saved.groups.keys() if not members else set()
        shared: dict[int, list[tuple[OptimizedParameter, str]]] = {}
        for member in members:
            name = next((n for n in names_of(member.fqn) if n in saved.group_of), None)
            if name is None:
                if chosen(state_prefix(parts.name, member.fqn)):
                    found.missing.append(state_prefix(parts.name, member.fqn)[:-1])
                continue
            found.used.add(name)
            origins.add(saved.group_of[name])
            shared.setdefault(id(member.parameter), []).append((member, name))
        for matched in shared.values():
            _Filler(parts, saved, found=found, group=group, chosen=chosen).fill(matched)
        key = f"{parts.name}.groups.{i}"
        found.missing += _unlike(parts.optimizer, saved, origins, key=key, chosen=chosen)
        _match_group(found, saved, origins, group=group, chosen=chosen, key=key)
    found.extra += [
        state_prefix(parts.name, fqn)[:-1] for fqn in sorted(saved.group_of.keys() - found.used)
    ]
    return found


def _keys(parts: OptimizerParts) -> Iterator[str]:
    yield from parts.keys
    for members in parts.groups:
        yield from (state_prefix(parts.name, member.fqn) for member in members)


def _unlike(
    optimizer: Optimizer,
    saved: SavedOptimizer,
    origins: set[int],
    *,
    key: str,
    chosen: Callable[[str], bool],
) -> list[str]:
    """Return settings of this optimizer that were not saved: the saved one was of another kind."""
    settings = [f"{key}.{name}" for name in optimizer.defaults if name not in HOW_NOT_WHAT]
    kept = {f"{key}.{name}" for origin in origins for name in saved.groups[origin]}
    return [name for name in settings if origins and name not in kept and chosen(name)]


def _match_group(
    found: Attachment,
    saved: SavedOptimizer,
    origins: set[int],
    *,
    group: dict[str, Any],
    chosen: Callable[[str], bool],
    key: str,
) -> None:
    if len(origins) > 1 and any(chosen(f"{key}.{hyper}") for hyper in group):
        found.differs.append(f"{key}: has parameters of saved groups {sorted(origins)}")
    elif len(origins) == 1:
        hypers = saved.groups[origins.pop()]
        keep = {h: v for h, v in hypers.items() if h not in HOW_NOT_WHAT and chosen(f"{key}.{h}")}
        found.hypers.append((group, keep))


class _Filler:
    """Prepares the state of one live parameter to receive its saved state."""

    def __init__(
        self,
        parts: OptimizerParts,
        saved: SavedOptimizer,
        *,
        found: Attachment,
        group: Mapping[str, Any],
        chosen: Callable[[str], bool],
    ) -> None:
        self._found, self._saved, self._chosen, self._name = found, saved, chosen, parts.name
        self._on_device = bool(group.get("capturable") or group.get("fused"))

    def fill(self, matched: Sequence[tuple[OptimizedParameter, str]]) -> None:
        """Prepare the state that the members share; each comes with the name it was saved under."""
        parameter = matched[0][0].parameter
        live = self._found.optimizer.state.get(parameter, {})
        saved = [self._saved.states.get(name, {}) for _, name in matched]
        keys = [state_prefix(self._name, member.fqn) for member, _ in matched]

        def is_wanted(key: str) -> bool:
            return any(self._chosen(prefix + key) for prefix in keys)

        wanted = [key for key in dict.fromkeys(chain(*saved)) if is_wanted(key)]
        state = {k: v for k, v in live.items() if k not in wanted and not is_wanted(k)}
        if not wanted and len(state) == len(live) > 0:
            return
        for key in wanted:
            items = [each.get(key) for each in saved]
            if all(isinstance(item, TensorSpec) for item in items):
                specs = [item for item in items if isinstance(item, TensorSpec)]
                state[key] = self._tensor(matched, specs, live.get(key))
            elif isinstance(items[0], _SavedTree) and len(matched) == 1:
                state[key] = plain.decode(items[0].tree, leaf=partial(self._nested, matched))
            elif any(item != items[0] for item in items):
                self._found.differs.append(
                    f"{state_prefix(self._name, matched[0][0].fqn)}{key}: the parameters of one "
                    "flat parameter were saved with different values; use use_orig_params=True"
                )
            else:
                state[key] = items[0]
        self._found.states.append((parameter, state))

    def _nested(
        self, matched: Sequence[tuple[OptimizedParameter, str]], tag: str, payload: Any
    ) -> Any:
        if tag not in REFERENCES or payload not in self._saved.nested:
            return plain.no_tags(tag, payload)
        room = self._tensor(matched, [self._saved.nested[payload]], None)
        return room.numpy() if tag == "$array" and room is not None else room

    def _tensor(
        self,
        matched: Sequence[tuple[OptimizedParameter, str]],
        specs: Sequence[TensorSpec],
        live: Any,
    ) -> torch.Tensor | None:
        """Return the tensor for a state key, the live one if it fits, and record its targets."""
        members = [member for member, _ in matched]
        room = live if isinstance(live, torch.Tensor) else None
        if room is not None and overlaps_itself(local_of(room)):
            room = None
        places = list(map(_place, members, specs, repeat(room)))
        if any(place is None for place in places):
            room = new_state(specs[0], members[0], scalars_on_device=self._on_device)
            places = list(map(_place, members, specs, repeat(room)))
        for member, spec, place in zip(members, specs, places, strict=True):
            if place is None:
                self._found.differs.append(
                    f"{spec.fqn}: saved with shape {list(spec.shape)} and {spec.dtype}; how that "
                    f"lies for {member.fqn}, of which this rank holds {_describe(member)}, cannot "
                    "be known"
                )
                return room
            if spec.shape or spec is specs[0]:
                self._found.targets.append((spec.fqn, place))
        if len(specs) > 1 and not specs[0].shape:
            self._found.alike.append(tuple(spec.fqn for spec in specs))
        return room


def _describe(member: OptimizedParameter) -> str:
    leaf = member.window.part if member.window else member.leaf
    return repr(leaf) if not isinstance(leaf, torch.Tensor) else f"{list(leaf.shape)}"


def _place(member: OptimizedParameter, spec: TensorSpec, state: torch.Tensor | None) -> Leaf | None:
    """Return the member's part of a state tensor, None where it is not as it was saved."""
    if state is None or torch_dtypes.NAME_OF.get(state.dtype) != spec.dtype:
        return None
    try:
        place = member.place(spec.fqn, state)
    except StateError:
        return None
    return place if tuple(place.shape) == spec.shape else None


def new_state(
    spec: TensorSpec, member: OptimizedParameter, *, scalars_on_device: bool
) -> torch.Tensor | None:
    """Return an empty tensor for a state of a parameter, placed as the parameter is.

    Scalars (``step``) are plain tensors, on the CPU unless ``scalars_on_device``. A state whose
    shape is not the parameter's (a factored moment) is placed as by torch's ``new_zeros`` of a
    gradient. Returns None where the parameter is a part and the placement of the state is unknown.
    """
    dtype, parameter = torch_dtypes.BY_NAME[spec.dtype], member.parameter.detach()
    if not spec.shape:
        device = parameter.device if scalars_on_device else torch.device("cpu")
        return torch.empty((), dtype=dtype, device=device)
    if member.window is not None:
        return torch.zeros_like(parameter, dtype=dtype)
    if tuple(member.leaf.shape) == spec.shape:
        room = empty_like(member.leaf, dtype=dtype)
        return room if isinstance(room, torch.Tensor) else local_of(room)
    if isinstance(member.leaf, torch.Tensor):
        return parameter.new_zeros(spec.shape, dtype=dtype)
    return None
