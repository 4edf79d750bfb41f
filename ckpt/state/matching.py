"""The match of a live state with a saved one, and their differences in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

import torch

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.geometry.layout import TensorSpec
from holdfast.ckpt.geometry.shard_index import owner_of
from holdfast.ckpt.state import landing, plain, torch_dtypes
from holdfast.ckpt.state.flatten import FlatState
from holdfast.ckpt.state.kinds.rebuilt import Rebuilt
from holdfast.ckpt.state.local_boxes import (
    Leaf,
    LocalBox,
    empty_like,
    local_boxes_of,
    local_of,
    overlaps_itself,
    spec_of,
)
from holdfast.ckpt.state.optimizers import SavedOptimizer, attach
from holdfast.ckpt.state.saved import SavedState
from holdfast.ckpt.state.trees.encoding import stored_names
from holdfast.ckpt.state.trees.per_rank import inherit, own_name
from holdfast.ckpt.types import Json


class StateMatch:
    """The saved tensors and values that fill a live state, and the differences of the two.

    ``targets`` and ``expanded`` map the name under which a tensor was stored to the live boxes that
    it fills; an expanded box has elements in the same memory. ``alike`` are groups of names that
    were saved of what is one live tensor. ``tree_tensors`` are the rooms for tensors of trees, by
    stored name. ``ranks`` says what becomes of per-rank values, ``attached`` of each optimizer.
    ``saved_anyhow`` are tensors that are built again, and were saved all the same.
    """

    def __init__(
        self,
        flat: FlatState,
        saved: SavedState,
        *,
        rank: int,
        world_size: int,
        chosen: Callable[[str], bool],
    ) -> None:
        self.flat, self.saved, self.chosen = flat, saved, chosen
        self.rank, self.world_size = rank, world_size
        self.ranks = inherit(
            {path: holder for path, holder in flat.per_rank.items() if chosen(path)},
            saved.ranks,
            rank=rank,
            world_size=world_size,
            can_carry=flat.carried is not None,
        )
        self.targets: dict[str, list[LocalBox]] = {}
        self.expanded: dict[str, list[landing.Expanded]] = {}
        self._wanted: dict[str, list[tuple[str, TensorSpec]]] = {}
        self._built: list[tuple[Rebuilt, str, Leaf]] = []
        self.saved_anyhow: list[tuple[Rebuilt, str]] = []
        self.tree_tensors: dict[str, Leaf] = {}
        self._live_names: dict[str, list[str]] = {}
        for name, first in flat.aliases.items():
            self._live_names.setdefault(first, []).append(name)
        self.attached = {
            name: attach(
                parts,
                SavedOptimizer(name, specs=saved.specs, values=saved.values),
                names_of=self._saved_names,
                chosen=chosen,
            )
            for name, parts in flat.optimizers.items()
        }
        self.alike = [names for found in self.attached.values() for names in found.alike]
        self._collect()

    def _saved_names(self, fqn: str) -> list[str]:
        """Return the names under which the live tensor ``fqn`` may have been stored."""
        names = [fqn, *self._live_names.get(fqn, ())]
        return list(dict.fromkeys(self.saved.aliases.get(name, name) for name in names))

    def _collect(self) -> None:
        self._collect_tensors()
        self._collect_built()
        for attachment in self.attached.values():
            for fqn, leaf in attachment.targets:
                self._add(fqn, fqn, leaf)
        for name in filter(self.chosen, self.flat.trees):
            for fqn in stored_names(self.saved.values.get(name)):
                self._add_tree_tensor(fqn, self.flat.trees[name].tensors.get(fqn))
        self._collect_ranks()

    def _collect_tensors(self) -> None:
        owned = set(self.flat.own)
        for parts in self.flat.optimizers.values():
            owned |= parts.keys
        for tree in self.flat.trees.values():
            owned |= tree.own
        for fqn, leaf in self.flat.tensors.items():
            if fqn not in owned and any(map(self.chosen, (fqn, *self._live_names.get(fqn, ())))):
                names = self._saved_names(fqn)
                stored = [name for name in names if name in self.saved.specs]
                self._add(stored[0] if stored else fqn, fqn, leaf)
                if len(stored) > 1:  # one live tensor that was several saved ones
                    self.alike.append(tuple(stored))

    def _collect_built(self) -> None:
        """Compare the tensors that are built again; fill those that were saved all the same."""
        for holder, tensors in self.flat.rebuilt.values():
            for fqn in filter(self.chosen, tensors):
                if fqn in self.saved.specs:
                    self._add(fqn, fqn, tensors[fqn])
                    self.saved_anyhow.append((holder, fqn))
                else:
                    self._built.append((holder, fqn, tensors[fqn]))

    def _collect_ranks(self) -> None:
        """Make room for all that this rank reads of per-rank values."""
        saved = self.saved.ranks
        for path in self.ranks.taken:
            for fqn in stored_names(saved[path][self.rank]):
                self._add_tree_tensor(fqn, self.flat.tensors.get(fqn))
        trees = [tree for path in self.ranks.merged for tree in saved[path].values()]
        for fqn in stored_names([*trees, *map(self.carried_tree, self.ranks.carried)]):
            self._add_tree_tensor(fqn)

    def _add(self, stored: str, name: str, leaf: Leaf) -> None:
        local = local_of(leaf)
        if local.is_conj() or local.is_neg():
            raise StateError(
                f"{name}: a lazy conjugate or negation cannot be filled in place; put the tensor "
                "itself into the state, or its resolve_conj().resolve_neg()"
            )
        self._wanted.setdefault(stored, []).append((name, spec_of(stored, leaf)))
        boxes = local_boxes_of(name, leaf)
        if not overlaps_itself(local):
            self.targets.setdefault(stored, []).extend(boxes)
        else:
            self.expanded.setdefault(stored, []).extend(
                landing.Expanded.of(name, box) for box in boxes
            )

    def carried_tree(self, name: str) -> Json:
        """Return the saved value of a rank that is gone, by the name of a carried value."""
        path, rank = owner_of(name, writer=self.rank)
        return self.saved.ranks[path][rank]

    def _add_tree_tensor(self, fqn: str, live: Leaf | None = None) -> None:
        """Make room for a tensor of a tree: placed as its live tensor, else whole."""
        spec = self.saved.specs.get(fqn)
        if spec is None or fqn in self.tree_tensors:
            return
        dtype = torch_dtypes.BY_NAME[spec.dtype]
        room: Leaf
        if live is not None and tuple(live.shape) == spec.shape:
            fills = self._can_fill(fqn, live) and spec_of(fqn, live) == spec
            room = live if fills else empty_like(live, dtype=dtype)
        else:
            device = local_of(live).device if live is not None else torch.device("cpu")
            room = torch.empty(spec.shape, dtype=dtype, device=device)
        self.tree_tensors[fqn] = room
        self._add(fqn, fqn, room)

    def _can_fill(self, fqn: str, live: Leaf) -> bool:
        """Say whether the live tensor itself may receive the saved bytes."""
        local = local_of(live)
        direct = any(fqn in tree.direct for tree in self.flat.rank_trees.values())
        lazy = local.is_conj() or local.is_neg()
        return direct and not lazy and not overlaps_itself(local)

    def differs(self) -> list[str]:
        """Say in words which tensors have another dtype or shape than the saved ones."""
        found = [text for attached in self.attached.values() for text in attached.differs]
        for stored, wanted in self._wanted.items():
            saved = self.saved.specs.get(stored)
            found += [
                f"{name} is {spec.dtype} {list(spec.shape)}, saved is "
                f"{saved.dtype} {list(saved.shape)}"
                for name, spec in wanted
                if saved is not None and saved != spec
            ]
        found += [
            text
            for name, text in self.flat.fixed.items()
            if self.chosen(name)
            and self.saved.values.get(name, self.flat.values[name]) != self.flat.values[name]
        ]
        found += filter(None, map(self._unlike_own, self.ranks.taken))
        found += filter(None, itertools.starmap(self._unlike_built, self._built))
        return [f"differs: {text}" for text in found]

    def _unlike_built(self, holder: Rebuilt, fqn: str, leaf: Leaf) -> str:
        """Say in words how a tensor that is built again differs from the saved run's."""
        saved = self.saved.values.get(fqn)
        return holder.difference(fqn, leaf, saved) if plain.is_digest(saved) else ""

    def _unlike_own(self, path: str) -> str:
        """Say in words why a tensor or array that is a rank's own value cannot be filled."""
        live = self.flat.tensors.get(own_name(path, self.rank))
        saved = [*stored_names(self.saved.ranks[path][self.rank])]
        direct = path in self.flat.rank_trees and own_name(path, self.rank) in (
            self.flat.rank_trees[path].direct
        )
        if live is None or not direct:
            return ""
        spec = self.saved.specs.get(saved[0]) if len(saved) == 1 else None
        if spec is not None and spec == spec_of(spec.fqn, live):
            return ""
        mine = spec_of(path, live)
        return (
            f"{path} of this rank is {mine.dtype} {list(mine.shape)}, saved is "
            + (f"{spec.dtype} {list(spec.shape)}" if spec else "no tensor")
            + "; keep one that grows in a dict, or in an object with state_dict()"
        )

    def missing(self) -> dict[str, str]:
        """Return the selected live keys that were not saved, with words; drop their targets."""
        found: dict[str, str] = {}
        for stored in [name for name in self._wanted if name not in self.saved.specs]:
            self.targets.pop(stored, None)
            self.expanded.pop(stored, None)
            for name, spec in self._wanted.pop(stored):
                found[name] = f"{name} {spec.dtype} {list(spec.shape)} was not saved"
                if plain.is_digest(self.saved.values.get(name)):
                    found[name] += (
                        ": it was frozen, and the saved run builds it again. Build it, freeze it, "
                        "and give its module as Rebuilt(module)"
                    )
        for _, name, leaf in self._built:
            if not plain.is_digest(self.saved.values.get(name)):
                spec = spec_of(name, leaf)
                found[name] = f"{name} {spec.dtype} {list(spec.shape)} was not saved"
        for name, attached in self.attached.items():
            for key in attached.missing:
                found[key] = f"{name} has no saved state for {key.removeprefix(name + '.state.')}"
                if key.startswith(f"{name}.groups."):
                    found[key] = f"value {key} was not saved: an optimizer of another kind was"
                if key == name:
                    found[key] = f"{name} (no optimizer of that name was saved)"
        left_out = self.flat.left_out
        for key in self.flat.values:
            known = key in self.saved.values or key in left_out or self._of_optimizer(key)
            if not known and self.chosen(key):
                found[key] = f"value {key} was not saved"
        return {key: f"missing: {text}" for key, text in found.items()}

    def extra(self, elsewhere: Collection[str]) -> dict[str, str]:
        """Return the selected saved keys that no entry of the state wants, each with its words."""
        saved, flat = self.saved, self.flat
        used = {*self._wanted, *(name for names in self.alike for name in names)}
        for name in saved.values:
            if name in flat.trees or name in elsewhere:
                used.update(stored_names(saved.values[name]))
        used |= saved.rank_tensors()
        known = used | flat.tensors.keys() | flat.aliases.keys() | flat.values.keys()
        known |= flat.trees.keys() | flat.left_out.keys()
        found: dict[str, str] = {}
        for kind, keys in (("", saved.specs), ("value ", saved.values)):
            for key in keys:
                theirs = key in elsewhere or key.rpartition(".")[0] in elsewhere
                if key not in known and not theirs and not self._of_optimizer(key):
                    found[key] = f"extra: {kind}{key} was saved and is not wanted"
        for path in saved.ranks:
            if path not in flat.per_rank and path not in elsewhere:
                found[path] = f"extra: per-rank value {path} was saved and is not wanted"
        for name, attached in self.attached.items():
            for key in attached.extra:
                if key not in elsewhere:
                    fqn = key.removeprefix(f"{name}.state.")
                    found[key] = f"extra: {name} was saved with parameter {fqn}"
        return {key: text for key, text in found.items() if self.chosen(key)}

    def _of_optimizer(self, key: str) -> bool:
        """Say whether ``key`` is state of a live optimizer; such keys are matched by parameter."""
        return any(key.startswith((f"{n}.groups.", f"{n}.state.")) for n in self.attached)

    def boxes(self) -> dict[str, list[LocalBox | landing.Expanded]]:
        """Return all boxes to read, by the name under which their tensor was stored."""
        return {
            fqn: [*self.targets.get(fqn, ()), *self.expanded.get(fqn, ())]
            for fqn in dict.fromkeys([*self.targets, *self.expanded])
        }
