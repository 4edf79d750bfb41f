"""Restore of saved bytes into a live state of any layout, in place; every byte is verified."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.geometry.reshard import Wanted
from holdfast.ckpt.geometry.shard_index import owner_of
from holdfast.ckpt.state import landing, plain, torch_dtypes
from holdfast.ckpt.state.flatten import FlatState, decode_small_tensor, flatten
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
from holdfast.ckpt.state.optimizers import SavedOptimizer, attach, state_prefix
from holdfast.ckpt.state.saved import SavedState, ShardSource, are_equal
from holdfast.ckpt.state.strictness import (
    Select,
    Strict,
    Strictness,
    check_selected,
    chooser,
    mismatch,
)
from holdfast.ckpt.state.trees.encoding import stored_names
from holdfast.ckpt.state.trees.per_rank import (
    CarriedRanks,
    Inheritance,
    inherit,
    own_name,
)
from holdfast.ckpt.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """The outcome of a restore; ``bytes`` counts the bytes read.

    ``missing`` are keys of the state that were not saved, and ``extra`` saved keys that the state
    does not have; ``strict`` accepted both. ``skipped`` are keys of the state that were not
    selected. ``kept`` names the per-rank values for which none was saved. The restore changed none
    of these. ``ranks`` says what became of all per-rank values.
    """

    step: int
    generation: int
    bytes: int
    seconds: float
    tensors: int
    origin: str = ""
    kept: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    ranks: Inheritance = field(default_factory=Inheritance)


def restore(
    state: Mapping[str, Any],
    source: ShardSource,
    *,
    rank: int,
    world_size: int | None = None,
    strict: Strict = "exact",
    select: Select = None,
    elsewhere: Collection[str] = (),
    leave: Collection[str] = (),
) -> RestoreReport:
    """Overwrite ``state`` with the contents of ``source``, whatever layout they were saved in.

    Live tensors are filled in place, DTensors in their own sharding. Optimizer state is created
    where missing, plain values are replaced, and Stateful objects load their state. Per-rank values
    come and go with the ranks (see `PerRank`), which are ``world_size`` now (None: as many as
    saved, and ``rank``). No communication.

    ``strict`` says which keys may be missing or extra (see ``holdfast.ckpt.state.strictness``),
    ``select`` which keys of the state to restore. Keys in ``elsewhere`` (``live_keys`` of other
    ranks, such as other pipeline stages) are not extra. Keys in ``leave`` stay as they are: the
    caller has other contents for them; ``<name>.state.<parameter>`` leaves all of a parameter's.

    Tensors that a `Rebuilt` leaves out are compared by their digests (see `rebuilt.inspect`), or
    filled if they were saved all the same.

    Names, shapes and dtypes are compared before anything changes (``MismatchError``). A
    ``CorruptError`` may leave the state half overwritten: restore from another source then.
    """
    started = time.perf_counter()
    strictness, chosen = Strictness.of(strict), _without(chooser(select), leave)
    saved, flat = SavedState.of(source), flatten(state, rank=rank)
    live = live_keys(flat)
    check_selected(select, [*live, *elsewhere])
    if world_size is None:
        world_size = max(rank + 1, saved.writers)
    job = _RestoreJob(flat, saved, rank=rank, world_size=world_size, chosen=chosen)
    missing, extra = job.missing(), job.extra(frozenset(elsewhere))
    verdict = strictness.judge(missing=missing, extra=extra)
    if problems := [*job.differs(), *verdict.refused]:
        raise mismatch(problems, origin=source.origin)
    source = job.part_of(source)
    if problems := job.unlike(source):
        raise mismatch(problems, origin=source.origin)
    values = job.values()
    nbytes = job.fill(source)
    job.finish(values)
    return RestoreReport(
        step=saved.step,
        generation=saved.generation,
        bytes=nbytes,
        seconds=time.perf_counter() - started,
        tensors=len(job.boxes()),
        origin=source.origin,
        kept=job.ranks.built,
        missing=verdict.missing,
        extra=verdict.extra,
        skipped=tuple(key for key in live if not chosen(key)),
        ranks=job.ranks,
    )


def _without(chosen: Callable[[str], bool], leave: Collection[str]) -> Callable[[str], bool]:
    """Return ``chosen`` without the keys in ``leave``, and those right below them."""
    if not leave:
        return chosen
    left = frozenset(leave)
    return lambda key: chosen(key) and not {key, key.rpartition(".")[0]} & left


def wanted(state: Mapping[str, Any], source: ShardSource, *, rank: int, world_size: int) -> Wanted:
    """Return the boxes of saved tensors that `restore` would read, without those not saved."""
    saved, flat = SavedState.of(source), flatten(state, rank=rank)
    job = _RestoreJob(flat, saved, rank=rank, world_size=world_size, chosen=chooser(None))
    job.missing()
    return {
        fqn: (saved.specs[fqn], tuple(item.box for item in boxes))
        for fqn, boxes in job.boxes().items()
    }


def live_keys(flat: FlatState) -> list[str]:
    """Return the keys of a state, for ``select`` and for other ranks' ``elsewhere``.

    An optimizer's parameter counts as ``<name>.state.<parameter>`` even before it has any state.
    """
    members = [
        state_prefix(parts.name, member.fqn)[:-1]
        for parts in flat.optimizers.values()
        for group in parts.groups
        for member in group
    ]
    tensors = (fqn for fqn in flat.tensors if fqn not in flat.own)
    found = [*tensors, *flat.left_out, *flat.aliases, *flat.values, *flat.per_rank, *members]
    return list(dict.fromkeys(found))


class _RestoreJob:
    """One restore: match live tensors with saved ones, fill them, then restore the rest.

    ``targets`` maps the name under which a tensor was stored to the live boxes that it fills.
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
        self._flat, self._saved, self._chosen = flat, saved, chosen
        self._rank, self._world_size = rank, world_size
        self.ranks = inherit(
            {path: holder for path, holder in flat.per_rank.items() if chosen(path)},
            saved.ranks,
            rank=rank,
            world_size=world_size,
            can_carry=flat.carried is not None,
        )
        self.targets: dict[str, list[LocalBox]] = {}
        self._expanded: dict[str, list[landing.Expanded]] = {}
        self._wanted: dict[str, list[tuple[str, TensorSpec]]] = {}
        self._built: list[tuple[Rebuilt, str, Leaf]] = []
        self._saved_anyhow: list[tuple[Rebuilt, str]] = []
        self._tree_tensors: dict[str, Leaf] = {}
        self._live_names: dict[str, list[str]] = {}
        for name, first in flat.aliases.items():
            self._live_names.setdefault(first, []).append(name)
        self._attached = {
            name: attach(
                parts,
                SavedOptimizer(name, specs=saved.specs, values=saved.values),
                names_of=self._saved_names,
                chosen=chosen,
            )
            for name, parts in flat.optimizers.items()
        }
        self._alike = [names for found in self._attached.values() for names in found.alike]
        self._collect()

    def _saved_names(self, fqn: str) -> list[str]:
        """Return the names under which the live tensor ``fqn`` may have been stored."""
        names = [fqn, *self._live_names.get(fqn, ())]
        return list(dict.fromkeys(self._saved.aliases.get(name, name) for name in names))

    def _collect(self) -> None:
        self._collect_tensors()
        self._collect_built()
        for attachment in self._attached.values():
            for fqn, leaf in attachment.targets:
                self._add(fqn, fqn, leaf)
        for name in filter(self._chosen, self._flat.trees):
            for fqn in stored_names(self._saved.values.get(name)):
                self._add_tree_tensor(fqn, self._flat.trees[name].tensors.get(fqn))
        self._collect_ranks()

    def _collect_tensors(self) -> None:
        owned = set(self._flat.own)
        for parts in self._flat.optimizers.values():
            owned |= parts.keys
        for tree in self._flat.trees.values():
            owned |= tree.own
        for fqn, leaf in self._flat.tensors.items():
            if fqn not in owned and any(map(self._chosen, (fqn, *self._live_names.get(fqn, ())))):
                names = self._saved_names(fqn)
                stored = [name for name in names if name in self._saved.specs]
                self._add(stored[0] if stored else fqn, fqn, leaf)
                if len(stored) > 1:  # one live tensor that was several saved ones
                    self._alike.append(tuple(stored))

    def _collect_built(self) -> None:
        """Compare the tensors that are built again; fill those that were saved all the same."""
        for holder, tensors in self._flat.rebuilt.values():
            for fqn in filter(self._chosen, tensors):
                if fqn in self._saved.specs:
                    self._add(fqn, fqn, tensors[fqn])
                    self._saved_anyhow.append((holder, fqn))
                else:
                    self._built.append((holder, fqn, tensors[fqn]))

    def _collect_ranks(self) -> None:
        """Make room for all that this rank reads of per-rank values."""
        saved = self._saved.ranks
        for path in self.ranks.taken:
            for fqn in stored_names(saved[path][self._rank]):
                self._add_tree_tensor(fqn, self._flat.tensors.get(fqn))
        trees = [tree for path in self.ranks.merged for tree in saved[path].values()]
        for fqn in stored_names([*trees, *map(self._carried_tree, self.ranks.carried)]):
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
            self._expanded.setdefault(stored, []).extend(
                landing.Expanded.of(name, box) for box in boxes
            )

    def _carried_tree(self, name: str) -> Json:
        path, rank = owner_of(name, writer=self._rank)
        return self._saved.ranks[path][rank]

    def _add_tree_tensor(self, fqn: str, live: Leaf | None = None) -> None:
        """Make room for a tensor of a tree: placed as its live tensor, else whole."""
        spec = self._saved.specs.get(fqn)
        if spec is None or fqn in self._tree_tensors:
            return
        dtype = torch_dtypes.BY_NAME[spec.dtype]
        room: Leaf
        if live is not None and tuple(live.shape) == spec.shape:
            fills = self._can_fill(fqn, live) and spec_of(fqn, live) == spec
            room = live if fills else empty_like(live, dtype=dtype)
        else:
            device = local_of(live).device if live is not None else torch.device("cpu")
            room = torch.empty(spec.shape, dtype=dtype, device=device)
        self._tree_tensors[fqn] = room
        self._add(fqn, fqn, room)

    def _can_fill(self, fqn: str, live: Leaf) -> bool:
        """Say whether the live tensor itself may receive the saved bytes."""
        local = local_of(live)
        direct = any(fqn in tree.direct for tree in self._flat.rank_trees.values())
        lazy = local.is_conj() or local.is_neg()
        return direct and not lazy and not overlaps_itself(local)

    def boxes(self) -> dict[str, list[LocalBox | landing.Expanded]]:
        """Return all boxes to read, by the name under which their tensor was stored."""
        return {
            fqn: [*self.targets.get(fqn, ()), *self._expanded.get(fqn, ())]
            for fqn in dict.fromkeys([*self.targets, *self._expanded])
        }

    def part_of(self, source: ShardSource) -> ShardSource:
        """Return the part of a source that this restore reads."""
        if not self._saved.is_outline:
            return source
        want: dict[str, list[Box] | None] = {
            fqn: [item.box for item in boxes] for fqn, boxes in self.boxes().items()
        }
        compared = [*self._alike, *landing.overlapping(self._landing_targets())]
        want |= {name: None for names in compared for name in names}
        return self._saved.part_of(source, want)

    def differs(self) -> list[str]:
        """Say in words which tensors have another dtype or shape than the saved ones."""
        found = [text for attached in self._attached.values() for text in attached.differs]
        for stored, wanted in self._wanted.items():
            saved = self._saved.specs.get(stored)
            found += [
                f"{name} is {spec.dtype} {list(spec.shape)}, saved is "
                f"{saved.dtype} {list(saved.shape)}"
                for name, spec in wanted
                if saved is not None and saved != spec
            ]
        found += [
            text
            for name, text in self._flat.fixed.items()
            if self._chosen(name)
            and self._saved.values.get(name, self._flat.values[name]) != self._flat.values[name]
        ]
        found += filter(None, map(self._unlike_own, self.ranks.taken))
        found += filter(None, itertools.starmap(self._unlike_built, self._built))
        return [f"differs: {text}" for text in found]

    def _unlike_built(self, holder: Rebuilt, fqn: str, leaf: Leaf) -> str:
        """Say in words how a tensor that is built again differs from the saved run's."""
        saved = self._saved.values.get(fqn)
        return holder.difference(fqn, leaf, saved) if plain.is_digest(saved) else ""

    def _unlike_own(self, path: str) -> str:
        """Say in words why a tensor or array that is a rank's own value cannot be filled."""
        live = self._flat.tensors.get(own_name(path, self._rank))
        saved = [*stored_names(self._saved.ranks[path][self._rank])]
        direct = path in self._flat.rank_trees and own_name(path, self._rank) in (
            self._flat.rank_trees[path].direct
        )
        if live is None or not direct:
            return ""
        spec = self._saved.specs.get(saved[0]) if len(saved) == 1 else None
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
        for stored in [name for name in self._wanted if name not in self._saved.specs]:
            self.targets.pop(stored, None)
            self._expanded.pop(stored, None)
            for name, spec in self._wanted.pop(stored):
                found[name] = f"{name} {spec.dtype} {list(spec.shape)} was not saved"
                if plain.is_digest(self._saved.values.get(name)):
                    found[name] += (
                        ": it was frozen, and the saved run builds it again. Build it, freeze it, "
                        "and give its module as Rebuilt(module)"
                    )
        for _, name, leaf in self._built:
            if not plain.is_digest(self._saved.values.get(name)):
                spec = spec_of(name, leaf)
                found[name] = f"{name} {spec.dtype} {list(spec.shape)} was not saved"
        for name, attached in self._attached.items():
            for key in attached.missing:
                found[key] = f"{name} has no saved state for {key.removeprefix(name + '.state.')}"
                if key.startswith(f"{name}.groups."):
                    found[key] = f"value {key} was not saved: an optimizer of another kind was"
                if key == name:
                    found[key] = f"{name} (no optimizer of that name was saved)"
        left_out = self._flat.left_out
        for key in self._flat.values:
            known = key in self._saved.values or key in left_out or self._of_optimizer(key)
            if not known and self._chosen(key):
                found[key] = f"value {key} was not saved"
        return {key: f"missing: {text}" for key, text in found.items()}

    def extra(self, elsewhere: Collection[str]) -> dict[str, str]:
        """Return the selected saved keys that no entry of the state wants, each with its words."""
        saved, flat = self._saved, self._flat
        used = {*self._wanted, *(name for names in self._alike for name in names)}
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
        for name, attached in self._attached.items():
            for key in attached.extra:
                if key not in elsewhere:
                    fqn = key.removeprefix(f"{name}.state.")
                    found[key] = f"extra: {name} was saved with parameter {fqn}"
        return {key: text for key, text in found.items() if self._chosen(key)}

    def _of_optimizer(self, key: str) -> bool:
        """Say whether ``key`` is state of a live optimizer; such keys are matched by parameter."""
        return any(key.startswith((f"{n}.groups.", f"{n}.state.")) for n in self._attached)

    def unlike(self, source: ShardSource) -> list[str]:
        """Say in words which live tensors were saved as several tensors that are not equal."""
        wanted = [names for names in self._alike if names[0] in self.boxes()]
        found = [names for names in wanted if not are_equal(source, self._saved, names)]
        targets = self._landing_targets()
        for names in landing.overlapping(targets):
            group = {name: targets[name] for name in names}
            if not self._are_equal(source, group) and landing.contradict(
                source, self._saved.places, group
            ):
                found.append(tuple(names))
        expanded = landing.read_expanded(
            source, self._saved.places, self._saved.specs, self._expanded
        )
        return expanded + [
            f"differs: {', '.join(names)} are one tensor here, and were saved with other contents"
            for names in found
        ]

    def _are_equal(self, source: ShardSource, group: landing.Targets) -> bool:
        """Say whether live tensors with the very same memory were saved with equal contents."""
        places = {
            (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), box)
            for _, parts in group.values()
            for box, tensor in parts
        }
        whole = all(len(parts) == 1 for _, parts in group.values())
        return len(places) == 1 and whole and are_equal(source, self._saved, list(group))

    def fill(self, source: ShardSource) -> int:
        """Read every wanted byte into its destination; return the number of bytes read."""
        for holder, fqn in self._saved_anyhow:
            holder.saved_from_now(fqn)
        nbytes = landing.fill(source, self._saved.places, self._landing_targets())
        for expanded in self._expanded.values():
            nbytes += sum(each.land() for each in expanded)
        return nbytes

    def _landing_targets(self) -> landing.Targets:
        return {
            fqn: (self._saved.specs[fqn], [(item.box, item.local) for item in boxes])
            for fqn, boxes in self.targets.items()
        }

    def values(self) -> dict[str, Any]:
        """Return the plain values to restore, each with its name."""
        return {
            name: plain.decode(self._saved.values[name])
            for name in self._flat.setters
            if name in self._saved.values and self._chosen(name)
        }

    def finish(self, values: Mapping[str, Any]) -> None:
        """Restore optimizers, plain values, Stateful objects and per-rank values."""
        for attachment in self._attached.values():
            attachment.apply()
        flat, saved, chosen = self._flat, self._saved, self._chosen
        for name, value in values.items():
            flat.setters[name](value)
        for name, tree in flat.trees.items():
            if chosen(name) and (name in saved.values or tree.may_be_empty):
                tree.load(plain.decode(saved.values.get(name, {}), leaf=self._tree_leaf))
        for path in (*self.ranks.taken, *self.ranks.merged):
            if path in flat.rank_trees:
                flat.rank_trees[path].load(self._own(path))
        if flat.carried is not None:
            self._carry(flat.carried)

    def _carry(self, carried: CarriedRanks) -> None:
        """Keep the values of ranks that are gone, in place of those kept before."""
        carried.values = {name: self._carried_tree(name) for name in self.ranks.carried}
        carried.tensors = {
            fqn: local_of(self._tree_tensors[fqn])
            for fqn in stored_names(list(carried.values.values()))
        }

    def _own(self, path: str) -> Any:
        """Return this rank's value of ``path``: its own, that merged of all, or as it was built."""
        trees = self._saved.ranks.get(path, {})
        if path in self.ranks.taken:
            return plain.decode(trees[self._rank], leaf=self._tree_leaf)
        if path in self.ranks.merged:
            merge = self._flat.per_rank[path].on_resize
            assert callable(merge)
            every = [plain.decode(trees[r], leaf=self._tree_leaf) for r in sorted(trees)]
            return merge(every, self._rank, self._world_size)
        return plain.decode(
            self._flat.rank_values[own_name(path, self._rank)], leaf=self._live_leaf
        )

    def _tree_leaf(self, tag: str, payload: Any) -> Any:
        if tag == "$tensor":
            return self._tree_tensors[payload]
        if tag == "$array":
            return local_of(self._tree_tensors[payload]).numpy()
        if tag == "$rank":
            return self._own(payload)
        return decode_small_tensor(tag, payload)

    def _live_leaf(self, tag: str, payload: Any) -> Any:
        """Decode what was encoded from the live state a moment ago."""
        if tag not in ("$tensor", "$array"):
            return decode_small_tensor(tag, payload)
        live = local_of(self._flat.tensors[payload])
        return live if tag == "$tensor" else live.numpy()
