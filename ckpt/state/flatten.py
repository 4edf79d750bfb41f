"""Flattening of a training state into named tensors and plain values; nothing is copied here.

A state is a mapping of names to modules, `ModelParts`, `Rebuilt`, optimizers, objects with
``state_dict`` and ``load_state_dict``, random generators, tensors, NumPy arrays, `PerRank` and
plain values, or mappings and lists of those. Keys of the result are dotted paths:
``model.layers.0.weight``, ``optimizer.state.<parameter>.exp_avg``, ``optimizer.groups.0.lr``,
``progress.tokens``. Anything else is refused with its path. A `Trace` tells later whether a second
pass would find the same again.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import (
    Callable,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import ArgumentError, MismatchError, StateError
from holdfast.ckpt.state import plain, torch_dtypes
from holdfast.ckpt.state.kinds.fsdp1 import flat_module, reshard
from holdfast.ckpt.state.kinds.model_parts import ModelParts
from holdfast.ckpt.state.kinds.rebuilt import Rebuilt
from holdfast.ckpt.state.kinds.wrapped import WrappedTensor, wrapped_of
from holdfast.ckpt.state.local_boxes import (
    LEAVES,
    SHARDS,
    Leaf,
    check_tensor,
    local_of,
)
from holdfast.ckpt.state.names import WRAPPER_ATTRIBUTES, join
from holdfast.ckpt.state.optimizers import (
    OptimizedParameter,
    OptimizerParts,
    Setter,
    flatten_optimizer,
)
from holdfast.ckpt.state.trees.arrays import tensor_of
from holdfast.ckpt.state.trees.encoding import TreeEncoder
from holdfast.ckpt.state.trees.per_rank import CarriedRanks, PerRank
from holdfast.ckpt.state.trees.refill import refill
from holdfast.ckpt.state.trees.state_dicts import (
    OWN_STATE,
    OwnModuleState,
    OwnOptimizerState,
    has_own,
    optimizer_has_own,
)
from holdfast.ckpt.state.trees.stateful import Stateful, stateful_of
from holdfast.ckpt.types import Json

_Replace: TypeAlias = Callable[[Any], object] | None
"""Puts another value into the place of one; None where the holder cannot be changed."""

_REFILLED: Final = (MutableMapping, MutableSequence, MutableSet)


@dataclass(slots=True, kw_only=True)
class TracedTree:
    """A tree: the function that returns it, or its per-rank holder, and its tensors' paths.

    ``name`` is that of a Stateful object's tree, or the path of a `PerRank`; ``root`` begins the
    names of its tensors. One that ``may_be_empty`` has a value only while it is not.
    """

    name: str
    take: Callable[[], Any] | PerRank
    root: str = ""
    may_be_empty: bool = False
    paths: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Trace:
    """The route of one ``flatten``.

    ``holders`` are the mappings and sequences that it entered, the state itself first. ``values``
    are the plain values in them (name, holder, key). ``first`` is the name of each tensor, by id.
    ``wrapped`` are the parts of wrapped tensors (wrapper, attribute, part). ``is_repeatable`` is
    false where a second pass over the same objects gives other tensors.
    """

    holders: list[Any] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    sharded: list[FSDPModule] = field(default_factory=list)
    values: list[tuple[str, Any, Any]] = field(default_factory=list)
    trees: list[TracedTree] = field(default_factory=list)
    first: dict[int, str] = field(default_factory=dict)
    wrapped: list[tuple[torch.Tensor, str, torch.Tensor]] = field(default_factory=list)
    is_repeatable: bool = True


@dataclass(slots=True, kw_only=True)
class Tree:
    """A Stateful object, or a `PerRank`: its tensors, by the name under which they are stored.

    ``own`` are those that nothing else in the state holds. ``direct`` are those that it holds
    itself, so that a restore may fill them. One that ``may_be_empty`` is loaded in any case, with
    an empty dict where none was saved.
    """

    tensors: dict[str, Leaf] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    may_be_empty: bool = False
    direct: set[str] = field(default_factory=set)
    load: Callable[[Any], Any]


@dataclass(slots=True, kw_only=True)
class FlatState:
    """A flattened state. ``tensors`` are the live ones; values are JSON, copied at the flattening.

    ``volatile`` names the tensors that may change before the next optimizer step: buffers, loose
    tensors, and the state of Stateful objects. All others are parameters and optimizer state.
    ``setters`` put a restored plain value back; ``trees`` and ``optimizers`` are restored as a
    whole. ``fixed`` are the plain values that cannot be replaced, because what holds them cannot be
    changed, with the refusal in words.

    ``rebuilt`` are the `Rebuilt` entries by path, each with the tensors that it leaves out.

    ``per_rank`` are the `PerRank` entries by path; ``rank_values`` have the trees of this rank, and
    of the ranks that it carries, by their own names. ``own`` names the tensors of these, which no
    other rank holds. ``rank_trees`` are the entries outside of Stateful objects, by path.
    """

    tensors: dict[str, Leaf] = field(default_factory=dict)
    volatile: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    values: dict[str, Json] = field(default_factory=dict)
    rank_values: dict[str, Json] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    setters: dict[str, Setter] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)
    rebuilt: dict[str, tuple[Rebuilt, dict[str, Leaf]]] = field(default_factory=dict)
    per_rank: dict[str, PerRank] = field(default_factory=dict)
    rank_trees: dict[str, Tree] = field(default_factory=dict)
    carried: CarriedRanks | None = None
    trees: dict[str, Tree] = field(default_factory=dict)
    optimizers: dict[str, OptimizerParts] = field(default_factory=dict)

    @property
    def left_out(self) -> dict[str, Leaf]:
        """All tensors that are left out, by name."""
        return {fqn: leaf for _, tensors in self.rebuilt.values() for fqn, leaf in tensors.items()}


def check_state(state: object) -> None:
    """Raise ``ArgumentError`` unless ``state`` is a mapping."""
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise ArgumentError(f"the state is a {kind}; give a dict with names: {{'model': model}}")


def flatten(state: Mapping[str, Any], *, rank: int = 0, trace: Trace | None = None) -> FlatState:
    """Flatten the ``state`` of ``rank``. Raises ``StateError`` with the path of a wrong entry.

    FSDP modules whose parameters are still gathered are resharded, as before an optimizer step.
    ``trace`` records where every entry was found.
    """
    walker = _Flattener(Trace() if trace is None else trace, rank=rank)
    try:
        walker.mapping("", state)
        walker.add_optimizers()
        walker.leave_out()
    except RecursionError:
        raise StateError(
            f"state: one of {', '.join(map(repr, list(state)[:10]))} holds itself, or is nested "
            "too deeply; flatten it"
        ) from None
    return walker.flat


@dataclass(slots=True)
class _Frozen:
    """The parameters without a gradient in a `Rebuilt`, and the names of their tensors."""

    fqns: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)


class _Flattener:
    def __init__(self, trace: Trace, *, rank: int) -> None:
        self.flat = FlatState()
        self._rank = rank
        self._trace = trace
        self._first = trace.first
        self._windows: dict[int, list[OptimizedParameter]] = {}
        self._flattened = set[str]()
        self._frozen: _Frozen | None = None
        self._holders: list[tuple[str, Rebuilt, _Frozen]] = []
        self._pending: list[tuple[str, Optimizer]] = []
        self._undivided: list[tuple[str, Optimizer]] = []

    def visit(self, name: str, value: Any, *, holder: Any, key: Any, replace: _Replace) -> None:  # noqa: PLR0912 - a branch for each kind
        if isinstance(value, nn.Module):
            self._module(name, value)
        elif isinstance(value, ModelParts):
            self._parts(name, value)
        elif isinstance(value, Rebuilt):
            self._rebuilt(name, value)
        elif isinstance(value, LBFGS):  # its history is in lists, one for all parameters
            self._undivided.append((name, value))
            self._tree(name, value.state_dict, value.load_state_dict)
        elif isinstance(value, Optimizer):
            self._pending.append((name, value))
        elif isinstance(value, LEAVES):
            self.tensor(name, value, volatile=True)
        elif isinstance(value, np.ndarray):
            self.tensor(name, tensor_of(name, value, filled=True), volatile=True)
        elif isinstance(value, PerRank):
            self._per_rank(name, value)
        elif isinstance(value, CarriedRanks):
            self._carried(value)
        elif (found := stateful_of(value)) is not None:
            self._tree(name, found.state_dict, found.load_state_dict)
        elif isinstance(value, Mapping) and not plain.is_plain(value):
            self.mapping(name, value)
        elif isinstance(value, list | tuple | deque) and not plain.is_plain(value):
            self._sequence(name, value, replace=replace)
        else:
            encoded = plain.encode(value, name, refilled=True)
            self.value(name, encoded, _item_setter(value, replace))
            if replace is None and not isinstance(value, _REFILLED):
                self.flat.fixed[name] = (
                    f"{name} is a plain value inside a {type(holder).__name__}, which cannot be "
                    "changed; use a dict or a list"
                )
            self._trace.values.append((name, holder, key))

    def mapping(self, name: str, value: Mapping[Any, Any]) -> None:
        self._trace.holders.append(value)
        for key, item in value.items():
            if not isinstance(key, str) or not key:
                raise StateError(f"{name or 'state'}: key {key!r} is not a name; use string keys")
            changes = isinstance(value, MutableMapping)
            replace = partial(operator.setitem, value, key) if changes else None
            self.visit(join(name, key), item, holder=value, key=key, replace=replace)

    def _sequence(self, name: str, value: Sequence[Any], *, replace: _Replace) -> None:
        self._trace.holders.append(value)
        tuples = _TupleItems(value, replace) if isinstance(value, tuple) and replace else None
        for i, item in enumerate(value):
            put: _Replace = partial(tuples.put, i) if tuples else None
            if isinstance(value, MutableSequence):
                put = partial(operator.setitem, value, i)
            self.visit(join(name, str(i)), item, holder=value, key=i, replace=put)

    def value(self, name: str, value: Json, setter: Setter) -> None:
        self._claim(name)
        self.flat.values[name] = value
        self.flat.setters[name] = setter

    def tensor(self, name: str, tensor: Leaf, *, volatile: bool) -> str:
        """Add a tensor, or an alias if the same object was added before; return the stored name."""
        own = tensor.tensor if isinstance(tensor, SHARDS) else tensor
        if (wrapped := wrapped_of(name, own)) is not None:
            return self._wrapped(name, wrapped, volatile=volatile)
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

    def _wrapped(self, name: str, wrapped: WrappedTensor, *, volatile: bool) -> str:
        """Add the parts of a tensor that wraps others, and its description."""
        for key, part in wrapped.parts.items():
            self._trace.wrapped.append((wrapped.tensor, key, part))
            self.tensor(join(name, key), part, volatile=volatile)
        self.value(name, wrapped.description, lambda _: None)
        self.flat.fixed[name] = (
            f"{name} is a {type(wrapped.tensor).__name__} of another kind than the saved one; "
            "build the model with the same quantisation"
        )
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
        plain.check_text(name, name)
        flat = self.flat
        if name in flat.tensors or name in flat.values or name in flat.aliases:
            raise StateError(f"{name}: two entries of the state have this name; rename one")

    def _per_rank(self, name: str, holder: PerRank) -> None:
        traced = TracedTree(name=name, take=holder)
        tree = Tree(load=lambda saved: _set_own(name, holder, saved))
        self._trace.trees.append(traced)
        encoder = self._encoder(tree, traced)
        encoder.add(name, holder)
        self._add_ranks(encoder)
        tree.direct = encoder.direct
        self.flat.rank_trees[name] = tree

    def _carried(self, carried: CarriedRanks) -> None:
        """Add the values of ranks that are gone, as they were saved."""
        self.flat.carried = carried
        self.flat.rank_values.update(carried.values)
        for name, tensor in carried.tensors.items():
            self._state(name, tensor, volatile=False)
            self.flat.own.add(name)

    def _module(self, name: str, module: nn.Module) -> None:
        for child in module.modules():
            if isinstance(child, FSDPModule):
                child.reshard()
                self._trace.sharded.append(child)
        reshard(module)
        self._walk(name, module)

    def _parts(self, name: str, parts: ModelParts) -> None:
        self._trace.holders.append(parts)
        for part in parts:
            self._module(name, part)

    def _rebuilt(self, name: str, holder: Rebuilt) -> None:
        before, self._frozen = self._frozen, _Frozen()
        if isinstance(holder.module, ModelParts):
            self._parts(name, holder.module)
        else:
            self._module(name, holder.module)
        self._holders.append((name, holder, self._frozen))
        self._frozen = before

    def leave_out(self) -> None:
        """Put digests in the place of frozen tensors that are built again; call this last."""
        flat = self.flat
        trees = [*flat.trees.values(), *flat.rank_trees.values()]
        kept = {fqn for tree in trees for fqn in tree.tensors}
        for name, holder, frozen in self._holders:
            tensors = {fqn: flat.tensors[fqn] for fqn in frozen.fqns if fqn not in kept}
            left_out = holder.left_out(tensors, frozen.parameters)
            flat.rebuilt[name] = (holder, left_out)
            for fqn, leaf in left_out.items():
                del flat.tensors[fqn]
                if (value := holder.value_of(fqn, leaf)) is not None:
                    flat.values[fqn] = value
            for alias in [name for name, fqn in flat.aliases.items() if fqn in left_out]:
                del flat.aliases[alias]

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
                before = len(self.flat.tensors)
                self.tensor(full, parameter, volatile=False)
                if self._frozen is not None and not parameter.requires_grad:
                    self._frozen.fqns += itertools.islice(self.flat.tensors, before, None)
                    self._frozen.parameters.append(parameter)
        transient = torch_private.transient_buffers_of(module)
        for key, buffer in buffers.items():
            if buffer is not None and key not in transient:
                self.tensor(join(name, key), buffer, volatile=True)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            path = join(name, "_extra_state")
            self._tree(path, module.get_extra_state, module.set_extra_state)
        if has_own(module):
            self._own_state(name, OwnModuleState(name, module), root=name)
        parallel = isinstance(module, DistributedDataParallel | DataParallel)
        for key, child in children.items():
            hidden = key in WRAPPER_ATTRIBUTES or (parallel and key == "module")
            if child is not None:
                self._walk(name if hidden else join(name, key), child)

    def _tree(self, name: str, take: Callable[[], Any], load: Callable[[Any], Any]) -> None:
        tree, traced = Tree(load=load), TracedTree(name=name, take=take, root=name)
        self._trace.trees.append(traced)
        self._claim(name)
        self._add_tree(tree, traced, take())

    def _own_state(self, name: str, own: Stateful, *, root: str) -> None:
        """Add the entries that a module's or an optimizer's ``state_dict()`` adds itself."""
        name = join(name, OWN_STATE)
        entries = own.state_dict()
        if entries:
            self._claim(name)
        tree = Tree(load=own.load_state_dict, may_be_empty=True)
        traced = TracedTree(name=name, take=own.state_dict, root=root, may_be_empty=True)
        self._trace.trees.append(traced)
        self._add_tree(tree, traced, entries)

    def _add_tree(self, tree: Tree, traced: TracedTree, entries: Any) -> None:
        encoder = self._encoder(tree, traced)
        found = encoder.encode(entries, traced.root)
        if found or not tree.may_be_empty:
            self.flat.values[traced.name] = found
        self._add_ranks(encoder)
        self.flat.trees[traced.name] = tree

    def _encoder(self, tree: Tree, traced: TracedTree) -> TreeEncoder:
        def add(path: str, leaf: Leaf, *, own: bool) -> str:
            stored = (self._state if own else self.tensor)(path, leaf, volatile=True)
            if own:
                self.flat.own.add(stored)
            if stored == path:
                tree.own.add(stored)
            tree.tensors[stored] = leaf
            return stored

        encoder = TreeEncoder(rank=self._rank, take=add)
        traced.paths = encoder.paths
        return encoder

    def _add_ranks(self, encoder: TreeEncoder) -> None:
        for path in encoder.per_rank:
            if path in self.flat.per_rank:
                raise StateError(f"{path}: two entries of the state have this name; rename one")
        self.flat.per_rank.update(encoder.per_rank)
        self.flat.rank_values.update(encoder.rank_values)

    def _members(self, parameter: torch.Tensor) -> list[OptimizedParameter]:
        """Return the named members of an optimizer's parameter: none, one, or several."""
        if (name := self._first.get(id(parameter))) is None:
            return self._windows.get(id(parameter), [])
        return [OptimizedParameter(fqn=name, parameter=parameter, leaf=self.flat.tensors[name])]

    def add_optimizers(self) -> None:
        for name, optimizer in self._undivided:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                for part in self._members(parameter):
                    if part.window is not None or not isinstance(part.leaf, torch.Tensor):
                        raise StateError(
                            f"{name}: {type(optimizer).__name__} keeps one history for all "
                            f"parameters, and this rank has only a part of {part.fqn}; use an "
                            "optimizer that keeps state by parameter"
                        )
        for name, optimizer in self._pending:
            parts = flatten_optimizer(
                name,
                optimizer,
                members=self._members,
                tensor=self._state,
                value=self.value,
            )
            self.flat.optimizers[name] = parts
            if parts.nests:
                self._trace.is_repeatable = False
            if optimizer_has_own(optimizer):
                self._own_state(
                    name, OwnOptimizerState(name, optimizer), root=join(name, OWN_STATE)
                )


def encode_small_tensor(path: str, value: Any) -> Json:
    """Encode a CPU tensor of at most 64 KiB inside a plain value, as ``$data``."""
    if not isinstance(value, torch.Tensor) or local_of(value) is not value:
        return plain.refuse(path, value)
    check_tensor(path, value)
    if value.device.type != "cpu" or value.nbytes > 1 << 16:
        raise StateError(
            f"{path}: a tensor of {value.nbytes} bytes on {value.device} cannot be captured here; "
            "only small CPU tensors (64 KiB) can"
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


def _set_own(path: str, holder: PerRank, saved: Any) -> None:
    """Put a rank's own value back; a tensor that the caller holds must not be replaced."""
    live = holder.value
    found = refill(live, saved)
    if found is not live and isinstance(live, torch.Tensor | np.ndarray):
        raise MismatchError(
            f"{path}: a per-rank {type(live).__name__} of {live.dtype} and shape "
            f"{list(live.shape)} was saved with another dtype or shape; keep one that grows in a "
            "dict, or in an object with state_dict()"
        )
    holder.value = found


class _TupleItems:
    """The items of a tuple: to put one in another's place is to replace the tuple in its holder."""

    def __init__(self, value: tuple[Any, ...], replace: Callable[[Any], object]) -> None:
        self._kind, self._items, self._replace = type(value), [*value], replace

    def put(self, i: int, item: Any) -> None:
        self._items[i] = item
        plain_tuple = self._kind is tuple
        self._replace(tuple(self._items) if plain_tuple else self._kind(*self._items))


def _item_setter(old: Any, replace: _Replace) -> Setter:
    """Return a function that replaces a plain value; a container is refilled in place."""

    def assign(value: Any) -> None:
        found = refill(old, value)
        if found is not old and replace is not None:
            replace(found)

    return assign
