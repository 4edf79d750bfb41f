"""Repeated flattening of one state; a part that is provably unchanged is not visited again.

A full flatten visits every tensor in Python. Between two steps hardly ever anything moves. So the
second pass checks only two things: the containers still hold the very same objects under the same
names, and the tensors among them still lie at the same addresses. Both checks compare whole lists
at once, so their loops run inside the interpreter. Plain values are always read again. If any
check fails, the state is flattened as if for the first time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.ckpt import torch_private
from holdfast.ckpt.state import plain
from holdfast.ckpt.state.flatten import (
    FlatState,
    Trace,
    TracedTree,
    flatten,
)
from holdfast.ckpt.state.kinds.model_parts import ModelParts
from holdfast.ckpt.state.kinds.rebuilt import Rebuilt
from holdfast.ckpt.state.local_boxes import (
    LEAVES,
    FlatShard,
    Leaf,
    TensorShard,
    check_tensor,
    local_of,
)
from holdfast.ckpt.state.optimizers import OptimizerParts, state_prefix
from holdfast.ckpt.state.trees.encoding import TreeEncoder
from holdfast.ckpt.state.trees.per_rank import CarriedRanks, PerRank
from holdfast.ckpt.state.trees.stateful import stateful_of
from holdfast.ckpt.types import Json

_ENTERED = (nn.Module, ModelParts, Rebuilt, Optimizer, PerRank, CarriedRanks)
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_SHAPE, _STRIDE, _DTYPE = attrgetter("shape"), torch.Tensor.stride, attrgetter("dtype")


class ChangeWatch:
    """Flattens one state of ``rank`` step after step.

    It keeps the objects it found alive until the next pass.
    """

    def __init__(self, *, rank: int = 0) -> None:
        self._rank = rank
        self._route: _Route | None = None

    def flatten(self, state: Mapping[str, Any]) -> tuple[FlatState, bool]:
        """Return ``state`` flattened, and whether its tensors have the addresses of the last time.

        The result belongs to this object; the next call updates it. Volatile tensors may be other
        objects of the same shape even if the answer is true. Raises ``StateError`` as
        ``flatten`` does.
        """
        if self._route is not None and self._route.repeat(state):
            return self._route.flat, True
        self._route, trace = None, Trace()
        flat = flatten(state, rank=self._rank, trace=trace)
        if trace.is_repeatable and _is_plainly_built(flat, trace):
            self._route = _Route(flat, trace, rank=self._rank)
        return flat, False


def _is_plainly_built(flat: FlatState, trace: Trace) -> bool:
    """Say whether modules and optimizers keep their entries in dicts, as torch's own do."""
    entries = [
        entry for parts in flat.optimizers.values() for entry in parts.optimizer.state.values()
    ]
    insides = chain.from_iterable(map(torch_private.module_dicts, trace.modules))
    return all(isinstance(found, dict) for found in chain(insides, entries))


class _Route:
    """The result of one flatten, and the route by which to repeat it."""

    def __init__(self, flat: FlatState, trace: Trace, *, rank: int) -> None:
        self.flat, self._trace = flat, trace
        index = {id(holder): i for i, holder in enumerate(trace.holders)}
        self._values = [(name, index[id(holder)], key) for name, holder, key in trace.values]
        self._is_value = {(holder, key) for _, holder, key in self._values}
        self._holders = self._outline(trace.holders)
        self._modules = _insides(trace.modules)
        self._kept = _contents(trace.modules)  # keeps them alive: no id is reused
        self._optimizers = [_OptimizerRoute(parts) for parts in flat.optimizers.values()]
        self._trees = [_TreeRoute(tree, flat=flat, rank=rank) for tree in trace.trees]
        self._places = _TensorPlaces(flat)

    def repeat(self, state: Mapping[str, Any]) -> bool:
        """Update ``flat`` if ``state`` lies as before; say whether it does."""
        for module in self._trace.sharded:
            module.reshard()
        holders = [state, *self._trace.holders[1:]]
        if self._outline(holders) != self._holders:
            return False
        if any(getattr(whole, key) is not part for whole, key, part in self._trace.wrapped):
            return False
        if _insides(self._trace.modules) != self._modules:
            return False
        if not all(optimizer.is_same() for optimizer in self._optimizers):
            return False
        if not all(holder.is_same(tensors) for holder, tensors in self.flat.rebuilt.values()):
            return False
        values = dict(self.flat.values)
        for name, holder, key in self._values:
            value = holders[holder][key]
            if not _is_value(value):
                return False
            values[name] = plain.encode(value, name, refilled=True)
        for optimizer in self._optimizers:
            values.update(optimizer.values())
        rank_values = dict(self.flat.carried.values) if self.flat.carried is not None else {}
        renewed: dict[str, torch.Tensor] = {}
        for tree in self._trees:
            if not tree.read(values, rank_values, renewed, first=self._trace.first):
                return False
        if not self._places.are_same(renewed):
            return False
        self._renew(renewed)
        self.flat.values = values
        self.flat.rank_values = rank_values
        return True

    def _outline(self, holders: Sequence[Any]) -> list[Any]:
        """Return sizes, keys and item identities of the holders; 0 stands for a plain value."""
        found: list[Any] = []
        for i, holder in enumerate(holders):
            items = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
            found.append(len(holder))
            for key, item in items:
                known = isinstance(key, str | int)
                found.append(key if known else None)
                found.append(0 if known and (i, key) in self._is_value else id(item))
        return found

    def _renew(self, renewed: Mapping[str, torch.Tensor]) -> None:
        first = self._trace.first
        for name in renewed:
            first.pop(id(self.flat.tensors[name]), None)
        for name, tensor in renewed.items():
            first[id(tensor)] = name
            self.flat.tensors[name] = tensor
        self._places.renew(renewed)


def _is_value(value: object) -> bool:
    """Say whether a flatten treats ``value`` as plain, or refuses it."""
    if type(value) in _SCALARS:
        return True
    if isinstance(value, (*_ENTERED, *LEAVES)):
        return False
    if stateful_of(value) is not None:
        return False
    return not isinstance(value, Mapping | list | tuple | deque) or plain.is_plain(value)


def _contents(modules: Sequence[nn.Module]) -> list[Any]:
    dicts = chain.from_iterable(map(torch_private.module_dicts, modules))
    return list(chain.from_iterable(map(dict.values, dicts)))


def _insides(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Return the identity of all parameters, buffers and children of the modules, as lists."""
    dicts: list[dict[str, Any]] = list(
        chain.from_iterable(map(torch_private.module_dicts, modules))
    )
    return (
        list(map(len, dicts)),
        list(chain.from_iterable(dicts)),
        list(map(id, chain.from_iterable(map(dict.values, dicts)))),
        list(map(type, modules)),
        list(map(len, chain.from_iterable(map(torch_private.state_dict_hooks_of, modules)))),
        [
            frozenset(found) if found else None
            for found in map(torch_private.transient_buffers_of, modules)
        ],
    )


class _OptimizerRoute:
    """An optimizer whose groups and states hold the same tensors as long as ``is_same`` is true."""

    def __init__(self, parts: OptimizerParts) -> None:
        self._name, self._optimizer = parts.name, parts.optimizer
        names = {id(m.parameter): m.fqn for members in parts.groups for m in members}
        at, self._plain = 0, list[tuple[int, str]]()
        for parameter, entry in self._optimizer.state.items():
            prefix = state_prefix(self._name, names[id(parameter)])
            for key, item in entry.items():
                if not isinstance(item, torch.Tensor):
                    self._plain.append((at, prefix + key))
                at += 1
        self._items: list[Any] = []
        self._known = self._look()

    def is_same(self) -> bool:
        """Say whether the optimizer has the same entries as before; plain values do not count."""
        try:
            return self._look() == self._known
        except TypeError:  # an entry is no dict any more
            return False

    def _look(self) -> tuple[Any, ...]:
        groups, state = self._optimizer.param_groups, self._optimizer.state
        members = [group["params"] for group in groups]
        entries: list[dict[str, Any]] = list(state.values())
        items = list(chain.from_iterable(map(dict.values, entries)))
        ids = list(map(id, items))
        for at, _ in self._plain:
            if at < len(ids) and plain.is_plain(items[at]):
                ids[at] = 0
        self._items = items if self._plain else []
        return (
            list(map(len, members)),
            list(map(id, chain.from_iterable(members))),
            [list(group) for group in groups],
            list(map(id, state)),
            list(map(len, entries)),
            list(chain.from_iterable(entries)),
            ids,
            list(map(len, torch_private.optimizer_state_dict_hooks_of(self._optimizer))),
        )

    def values(self) -> Iterator[tuple[str, Json]]:
        """Yield the current plain values."""
        for i, group in enumerate(self._optimizer.param_groups):
            for key, hyper in group.items():
                if key == "params":
                    continue
                name = f"{self._name}.groups.{i}.{key}"
                scalar = isinstance(hyper, torch.Tensor) and hyper.ndim == 0
                yield name, plain.encode(hyper.item() if scalar else hyper, name)
        for at, name in self._plain:
            yield name, plain.encode(self._items[at], name)


class _TreeRoute:
    """A tree: it is read again every time, often with new tensors in it."""

    def __init__(self, traced: TracedTree, *, flat: FlatState, rank: int) -> None:
        self._traced, self._flat, self._rank = traced, flat, rank
        # Names under which something else finds its tensor as well: another entry of the state, or
        # an optimizer. With a new tensor there, that something holds a tensor without a name.
        self._shared = frozenset(flat.aliases.values()) | {
            member.fqn
            for parts in flat.optimizers.values()
            for members in parts.groups
            for member in members
        }

    def read(
        self,
        values: dict[str, Json],
        rank_values: dict[str, Json],
        renewed: dict[str, torch.Tensor],
        *,
        first: Mapping[int, str],
    ) -> bool:
        """Write the tree to ``values`` and its new tensors to ``renewed``; False if it changed.

        This rank's own trees go to ``rank_values``.
        """
        same = True

        def take(path: str, leaf: Leaf, *, own: bool) -> str:
            nonlocal same
            stored = path if own else self._flat.aliases.get(path, path)
            same = same and self._fits(path, stored, leaf, renewed, first=first)
            return stored

        tree, encoder = self._traced, TreeEncoder(rank=self._rank, take=take)
        if isinstance(tree.take, PerRank):
            encoder.add(tree.name, tree.take)
        else:
            found = encoder.encode(tree.take(), tree.root)
            if bool(found) != (tree.name in self._flat.values) and tree.may_be_empty:
                return False
            if found or not tree.may_be_empty:
                values[tree.name] = found
        rank_values.update(encoder.rank_values)
        self._flat.per_rank.update(encoder.per_rank)
        known = encoder.rank_values.keys() <= self._flat.rank_values.keys()
        return same and known and encoder.paths == tree.paths

    def _fits(
        self,
        path: str,
        stored: str,
        value: Leaf,
        renewed: dict[str, torch.Tensor],
        *,
        first: Mapping[int, str],
    ) -> bool:
        known = renewed.get(stored, self._flat.tensors.get(stored))
        if known is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            return False
        if value is known:
            return True
        if (
            path != stored
            or path in self._shared
            or id(value) in first
            or isinstance(known, DTensor | TensorShard | FlatShard)
        ):
            return False
        if any(value is other for other in renewed.values()):
            return False
        check_tensor(path, value)
        renewed[path] = value
        return True


class _TensorPlaces:
    """Addresses and shapes of a state's tensors in memory."""

    def __init__(self, flat: FlatState) -> None:
        self._index = {name: i for i, name in enumerate(flat.tensors)}
        leaves = list(flat.tensors.values())
        self._locals = [local_of(leaf) for leaf in leaves]
        self._wrapped = [
            (i, leaf)
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, DTensor | TensorShard | FlatShard)
        ]
        self._volatile = [self._index[name] for name in flat.volatile]
        self._complex = [i for i, tensor in enumerate(self._locals) if tensor.is_complex()]
        self._layouts = [_layout(leaf) for _, leaf in self._wrapped]
        self._pointers = self._addresses(self._locals)
        self._shapes = list(map(_SHAPE, self._locals))
        self._strides = list(map(_STRIDE, self._locals))
        self._dtypes = list(map(_DTYPE, self._locals))
        self._signs = self._views(self._locals)

    def are_same(self, renewed: Mapping[str, torch.Tensor]) -> bool:
        """Say whether nothing moved; ``renewed`` are volatile tensors that are new objects."""
        found = self._locals
        if self._wrapped or renewed:
            found = list(found)
            for name, tensor in renewed.items():
                found[self._index[name]] = tensor
            for i, leaf in self._wrapped:
                found[i] = local_of(leaf)
            layouts = [_layout(leaf) for _, leaf in self._wrapped]
            if any(a is not b and a != b for a, b in zip(layouts, self._layouts, strict=True)):
                return False
        # Shapes and strides are compared one by one as they are made: a list of thousands of new
        # tuples would trigger the garbage collector at every step.
        return (
            self._addresses(found) == self._pointers
            and all(map(is_, map(_DTYPE, found), self._dtypes))
            and all(map(eq, map(_SHAPE, found), self._shapes))
            and all(map(eq, map(_STRIDE, found), self._strides))
            and self._views(found) == self._signs
        )

    def renew(self, renewed: Mapping[str, torch.Tensor]) -> None:
        """Record the new objects that ``are_same`` has accepted."""
        for name, tensor in renewed.items():
            self._locals[self._index[name]] = tensor

    def _addresses(self, found: Sequence[torch.Tensor]) -> list[int]:
        pointers = list(map(torch.Tensor.data_ptr, found))
        for i in self._volatile:
            pointers[i] = 0  # copied at once, from any address
        return pointers

    def _views(self, found: Sequence[torch.Tensor]) -> tuple[list[bool], list[bool]]:
        """Return which tensors are lazy negations, and which complex ones lazy conjugates."""
        negative = list(map(torch.Tensor.is_neg, found))
        return negative, [found[i].is_conj() for i in self._complex]


def _layout(leaf: Leaf) -> Any:
    if isinstance(leaf, DTensor):
        return torch_private.dtensor_spec_of(leaf)
    assert isinstance(leaf, TensorShard | FlatShard)
    return leaf.shape, leaf.offset if isinstance(leaf, TensorShard) else leaf.start
