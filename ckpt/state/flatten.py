"""Flattening of a training state into named tensors and plain values; nothing is copied here.

A state is a mapping of names to modules, `ModelParts`, optimizers, objects with ``state_dict`` and
``load_state_dict``, tensors, `PerRank` and plain values, or mappings and lists of those. Keys of
the result are dotted paths: ``model.layers.0.weight``, ``optimizer.state.<parameter>.exp_avg``,
``optimizer.groups.0.lr``, ``progress.tokens``. Anything else is refused with its path. A `Trace`
tells later whether a second pass would find the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import StateError
from holdfast.ckpt.state import plain, torch_dtypes
from holdfast.ckpt.state.fsdp1 import flat_module, reshard
from holdfast.ckpt.state.local_boxes import LEAVES, FlatShard, Leaf, TensorShard, local_of
from holdfast.ckpt.state.model_parts import ModelParts
from holdfast.ckpt.state.names import WRAPPER_ATTRIBUTES, join
from holdfast.ckpt.state.optimizers import (
    OptimizedParameter,
    OptimizerParts,
    Setter,
    flatten_optimizer,
)
from holdfast.ckpt.types import Json


@dataclass(slots=True, kw_only=True)
class TracedTree:
    """A Stateful object's tree: the function that returns it, and its paths of non-plain values."""

    name: str
    take: Callable[[], Any]
    paths: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Trace:
    """The route of one ``flatten``.

    ``holders`` are the mappings and sequences that it entered, the state itself first. ``values``
    are the plain values in them (name, holder, key); ``per_rank`` are their per-rank values, by
    name. ``first`` is the name of each tensor, by id. ``is_repeatable`` is false where a second
    pass over the same objects gives other tensors.
    """

    holders: list[Any] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    sharded: list[FSDPModule] = field(default_factory=list)
    values: list[tuple[str, Any, Any]] = field(default_factory=list)
    per_rank: list[tuple[str, Any]] = field(default_factory=list)
    trees: list[TracedTree] = field(default_factory=list)
    first: dict[int, str] = field(default_factory=dict)
    is_repeatable: bool = True


@runtime_checkable
class Stateful(Protocol):
    """An object that returns its state as a tree of tensors and plain values, and can load it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state that ``state_dict`` returned earlier."""
        ...


class PerRank:
    """A plain value, or a small CPU tensor, that every rank keeps for itself (a random state).

    It is restored at the rank that saved it. Ranks beyond the saved world keep their own value.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


@dataclass(slots=True, kw_only=True)
class Tree:
    """A Stateful object: the tensors in its state, by the name under which they are stored."""

    tensors: dict[str, Leaf] = field(default_factory=dict)
    load: Callable[[Any], Any]


@dataclass(slots=True, kw_only=True)
class FlatState:
    """A flattened state. ``tensors`` are the live ones; values are JSON, copied at the flattening.

    ``volatile`` names the tensors that may change before the next optimizer step: buffers, loose
    tensors, and the state of Stateful objects. All others are parameters and optimizer state.
    ``setters`` put a restored plain value back; ``trees`` and ``optimizers`` are restored as a
    whole.
    """

    tensors: dict[str, Leaf] = field(default_factory=dict)
    volatile: set[str] = field(default_factory=set)
    values: dict[str, Json] = field(default_factory=dict)
    rank_values: dict[str, Json] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    setters: dict[str, Setter] = field(default_factory=dict)
    rank_setters: dict[str, Setter] = field(default_factory=dict)
    trees: dict[str, Tree] = field(default_factory=dict)
    optimizers: dict[str, OptimizerParts] = field(default_factory=dict)


def flatten(state: Mapping[str, Any], *, trace: Trace | None = None) -> FlatState:
    """Flatten ``state``. Raises ``StateError`` with the path of an entry that cannot be captured.

    FSDP modules whose parameters are still gathered are resharded, as before an optimizer step.
    ``trace`` records where every entry was found.
    """
    walker = _Flattener(Trace() if trace is None else trace)
    try:
        walker.mapping("", state)
        walker.add_optimizers()
    except RecursionError:
        raise StateError(
            f"state: one of {', '.join(map(repr, list(state)[:10]))} holds itself, or is nested "
            "too deeply; flatten it"
        ) from None
    return walker.flat


def check_tensor(fqn: str, leaf: Leaf) -> None:
    """Raise ``StateError`` if the tensor is not plain bytes, or not materialised."""
    local = local_of(leaf)
    if nn.parameter.is_lazy(local) or local.is_meta:
        raise StateError(f"{fqn}: not materialised yet; run the model or call to_empty() first")
    if local.layout != torch.strided:
        raise StateError(f"{fqn}: layout {local.layout} cannot be captured; use a dense tensor")
    if local.dtype not in torch_dtypes.NAME_OF:
        raise StateError(
            f"{fqn}: dtype {local.dtype} cannot be captured; keep its integer values and scales"
        )
    if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise StateError(
            f"{fqn}: tensor subclass {type(local).__name__} cannot be captured; keep the plain "
            "tensors it is made of"
        )


class _Flattener:
    def __init__(self, trace: Trace) -> None:
        self.flat = FlatState()
        self._trace = trace
        self._first = trace.first
        self._windows: dict[int, list[OptimizedParameter]] = {}
        self._flattened = set[str]()
        self._pending: list[tuple[str, Optimizer]] = []

    def visit(self, name: str, value: Any, *, holder: Any, key: Any) -> None:
        if isinstance(value, nn.Module):
            self._module(name, value)
        elif isinstance(value, ModelParts):
            self._trace.holders.append(value)
            for part in value:
                self._module(name, part)
        elif isinstance(value, LBFGS):  # its history is in lists, one for all parameters
            self._tree(name, value.state_dict, value.load_state_dict)
        elif isinstance(value, Optimizer):
            self._pending.append((name, value))
        elif isinstance(value, LEAVES):
            self.tensor(name, value, volatile=True)
        elif isinstance(value, PerRank):
            self._per_rank(name, value)
            self._trace.per_rank.append((name, value))
        elif isinstance(value, Stateful):
            self._tree(name, value.state_dict, value.load_state_dict)
        elif isinstance(value, Mapping) and not plain.is_plain(value):
            self.mapping(name, value)
        elif isinstance(value, list | tuple) and not plain.is_plain(value):
            self._sequence(name, value)
        else:
            self.value(name, plain.encode(value, name), _item_setter(name, holder, key, value))
            self._trace.values.append((name, holder, key))

    def mapping(self, name: str, value: Mapping[Any, Any]) -> None:
        self._trace.holders.append(value)
        for key, item in value.items():
            if not isinstance(key, str) or not key:
                raise StateError(f"{name or 'state'}: key {key!r} is not a name; use string keys")
            self.visit(join(name, key), item, holder=value, key=key)

    def _sequence(self, name: str, value: list[Any] | tuple[Any, ...]) -> None:
        self._trace.holders.append(value)
        for i, item in enumerate(value):
            self.visit(join(name, str(i)), item, holder=value, key=i)

    def value(self, name: str, value: Json, setter: Setter) -> None:
        self._claim(name)
        self.flat.values[name] = value
        self.flat.setters[name] = setter

    def tensor(self, name: str, tensor: Leaf, *, volatile: bool) -> str:
        """Add a tensor, or an alias if the same object was added before; return the stored name."""
        own = tensor.tensor if isinstance(tensor, TensorShard | FlatShard) else tensor
        first = self._first.get(id(own))
        if first == name:
            return name
        self._claim(name)
        if first is not None:
            self.flat.aliases[name] = first
            return first
        self._first[id(own)] = name
        self._add(name, tensor, volatile=volatile)
        return name

    def _state(self, name: str, tensor: Leaf, *, volatile: bool) -> str:
        """Add a tensor of an optimizer's state.

        It is never an alias: its parameter gives it its name.
        """
        self._claim(name)
        self._add(name, tensor, volatile=volatile)
        return name

    def _add(self, name: str, tensor: Leaf, *, volatile: bool) -> None:
        check_tensor(name, tensor)
        self.flat.tensors[name] = tensor
        if volatile:
            self.flat.volatile.add(name)

    def _claim(self, name: str) -> None:
        flat = self.flat
        if name in flat.tensors or name in flat.values or name in flat.aliases:
            raise StateError(f"{name}: two entries of the state have this name; rename one")

    def _per_rank(self, name: str, holder: PerRank) -> None:
        self.flat.rank_values[name] = plain.encode(holder.value, name, leaf=encode_small_tensor)
        self.flat.rank_setters[name] = lambda value: setattr(holder, "value", value)

    def _module(self, name: str, module: nn.Module) -> None:
        for child in module.modules():
            if isinstance(child, FSDPModule):
                child.reshard()
                self._trace.sharded.append(child)
        reshard(module)
        self._walk(name, module)

    def _flat_module(self, name: str, module: FullyShardedDataParallel) -> None:
        """Add the parameters that an FSDP1 module flattened.

        Call before its children are walked.
        """
        self._trace.is_repeatable = False  # every forward pass makes new views
        flat = flat_module(name, module)
        for member in flat.members:
            if member.window is None:
                self.tensor(member.fqn, member.leaf, volatile=False)
                continue
            self._claim(member.fqn)
            self._windows.setdefault(id(member.parameter), []).append(member)
            self._add(member.fqn, member.leaf, volatile=False)
        for alias, fqn in flat.aliases.items():
            self._claim(alias)
            self.flat.aliases[alias] = self.flat.aliases.get(fqn, fqn)
        self._flattened |= {member.fqn for member in flat.members} | flat.aliases.keys()

    def _walk(self, name: str, module: nn.Module) -> None:
        self._trace.modules.append(module)
        if isinstance(module, FullyShardedDataParallel):
            self._flat_module(name, module)
        parameters, buffers, children = torch_private.module_dicts(module)
        for key, parameter in parameters.items():
            full = join(name, key)
            if (
                parameter is not None
                and key != torch_private.FLAT_PARAMETER
                and full not in self._flattened
            ):
                self.tensor(full, parameter, volatile=False)
        transient = torch_private.transient_buffers_of(module)
        for key, buffer in buffers.items():
            if buffer is not None and key not in transient:
                self.tensor(join(name, key), buffer, volatile=True)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            path = join(name, "_extra_state")
            self._tree(path, module.get_extra_state, module.set_extra_state)
        parallel = isinstance(module, DistributedDataParallel | DataParallel)
        for key, child in children.items():
            hidden = key in WRAPPER_ATTRIBUTES or (parallel and key == "module")
            if child is not None:
                self._walk(name if hidden else join(name, key), child)

    def _tree(self, name: str, take: Callable[[], Any], load: Callable[[Any], Any]) -> None:
        tree, traced = Tree(load=load), TracedTree(name=name, take=take)
        self._trace.trees.append(traced)

        def leaf(path: str, value: Any) -> Json:
            traced.paths.append(path)
            if isinstance(value, LEAVES):
                stored = self.tensor(path, value, volatile=True)
                tree.tensors[stored] = value
                return {"$tensor": stored}
            if isinstance(value, PerRank):
                self._per_rank(path, value)
                return {"$rank": path}
            return plain.refuse(path, value)

        self._claim(name)
        self.flat.values[name] = plain.encode(take(), name, leaf=leaf)
        self.flat.trees[name] = tree

    def _members(self, parameter: torch.Tensor) -> list[OptimizedParameter]:
        """Return the named members of an optimizer's parameter: none, one, or several."""
        if (name := self._first.get(id(parameter))) is None:
            return self._windows.get(id(parameter), [])
        return [OptimizedParameter(fqn=name, parameter=parameter, leaf=self.flat.tensors[name])]

    def add_optimizers(self) -> None:
        for name, optimizer in self._pending:
            parts = flatten_optimizer(
                name,
                optimizer,
                members=self._members,
                tensor=self._state,
                value=self.value,
            )
            self.flat.optimizers[name] = parts


def encode_small_tensor(path: str, value: Any) -> Json:
    """Encode a CPU tensor of at most 64 KiB inside a per-rank value, as ``$data``."""
    if not isinstance(value, torch.Tensor) or local_of(value) is not value:
        return plain.refuse(path, value)
    check_tensor(path, value)
    if value.device.type != "cpu" or value.nbytes > 1 << 16:
        raise StateError(
            f"{path}: a per-rank tensor of {value.nbytes} bytes on {value.device} cannot be "
            "captured; only small CPU tensors (64 KiB) can"
        )
    data = torch_dtypes.as_carrier(value.contiguous()).numpy().tobytes()
    inner = {"dtype": torch_dtypes.NAME_OF[value.dtype], "shape": list(value.shape)}
    return {"$data": inner | plain.encode(data, path)}


def decode_small_tensor(tag: str, payload: Any) -> Any:
    """Decode the result of ``encode_small_tensor``."""
    if tag != "$data":
        return plain.no_tags(tag, payload)
    data = bytearray(plain.decode({"$bytes": payload["$bytes"]}))
    tensor = torch.empty(payload["shape"], dtype=torch_dtypes.BY_NAME[payload["dtype"]])
    if data:
        torch_dtypes.as_carrier(tensor).view(-1).view(torch.uint8).copy_(
            torch.frombuffer(data, dtype=torch.uint8)
        )
    return tensor


def _item_setter(path: str, holder: Any, key: Any, old: Any) -> Setter:
    """Return a function that replaces ``holder[key]``; a mutable container is refilled in place."""

    def assign(value: Any) -> None:
        if isinstance(old, MutableMapping) and isinstance(value, Mapping):
            old.clear()
            old.update(value)
        elif isinstance(old, MutableSequence) and isinstance(value, list):
            old[:] = value
        elif isinstance(holder, MutableMapping | MutableSequence):
            holder[key] = value
        else:
            raise StateError(
                f"{path}: a plain value inside a {type(holder).__name__} cannot be put back; "
                "use a dict or a list"
            )

    return assign
