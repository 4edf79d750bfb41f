"""Restore of saved bytes into a live state of any layout, in place; every byte is verified."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.reshard import Wanted
from holdfast.ckpt.state import landing, plain
from holdfast.ckpt.state.flatten import FlatState, decode_small_tensor, flatten
from holdfast.ckpt.state.local_boxes import (
    local_of,
)
from holdfast.ckpt.state.matching import StateMatch
from holdfast.ckpt.state.optimizers import state_prefix
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
    own_name,
)


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
    state: Mapping[str, Any] | FlatState,
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

    A state that was just flattened may be given as that. Live tensors are filled in place, DTensors
    in their own sharding. Optimizer state is created where missing, plain values are replaced, and
    Stateful objects load their state. Per-rank values come and go with the ranks (see `PerRank`),
    which are ``world_size`` now (None: as many as saved, and ``rank``). No communication.

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
    flat = state if isinstance(state, FlatState) else flatten(state, rank=rank)
    saved = SavedState.of(source)  # a source that is still opening its shards had time for it
    live = live_keys(flat)
    check_selected(select, [*live, *elsewhere])
    if world_size is None:
        world_size = max(rank + 1, saved.writers)
    match = StateMatch(flat, saved, rank=rank, world_size=world_size, chosen=chosen)
    missing, extra = match.missing(), match.extra(frozenset(elsewhere))
    verdict = strictness.judge(missing=missing, extra=extra)
    if problems := [*match.differs(), *verdict.refused]:
        raise mismatch(problems, origin=source.origin)
    job = _RestoreJob(match)
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
        tensors=len(match.boxes()),
        origin=source.origin,
        kept=match.ranks.built,
        missing=verdict.missing,
        extra=verdict.extra,
        skipped=tuple(key for key in live if not chosen(key)),
        ranks=match.ranks,
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
    match = StateMatch(flat, saved, rank=rank, world_size=world_size, chosen=chooser(None))
    match.missing()
    return {
        fqn: (saved.specs[fqn], tuple(item.box for item in boxes))
        for fqn, boxes in match.boxes().items()
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
    """One restore: fill the live tensors of a match, then restore the rest."""

    def __init__(self, match: StateMatch) -> None:
        self._match, self._saved = match, match.saved
        self._targets: landing.Targets = {
            fqn: (self._saved.specs[fqn], [(item.box, item.local) for item in boxes])
            for fqn, boxes in match.targets.items()
        }

    def part_of(self, source: ShardSource) -> ShardSource:
        """Return the part of a source that this restore reads."""
        if not self._saved.is_outline:
            return source
        want: dict[str, list[Box] | None] = {
            fqn: [item.box for item in boxes] for fqn, boxes in self._match.boxes().items()
        }
        compared = [*self._match.alike, *self._overlapping]
        want |= {name: None for names in compared for name in names}
        return self._saved.part_of(source, want)

    def unlike(self, source: ShardSource) -> list[str]:
        """Say in words which live tensors were saved as several tensors that are not equal."""
        wanted = [names for names in self._match.alike if names[0] in self._match.boxes()]
        found = [names for names in wanted if not are_equal(source, self._saved, names)]
        for names in self._overlapping:
            group = {name: self._targets[name] for name in names}
            if not self._are_equal(source, group) and landing.contradict(
                source, self._saved.places, group
            ):
                found.append(tuple(names))
        expanded = landing.read_expanded(
            source, self._saved.places, self._saved.specs, self._match.expanded
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
        for holder, fqn in self._match.saved_anyhow:
            holder.saved_from_now(fqn)
        nbytes = landing.fill(source, self._saved.places, self._targets)
        for expanded in self._match.expanded.values():
            nbytes += sum(each.land() for each in expanded)
        return nbytes

    @functools.cached_property
    def _overlapping(self) -> list[list[str]]:
        return landing.overlapping(self._targets)

    def values(self) -> dict[str, Any]:
        """Return the plain values to restore, each with its name."""
        return {
            name: plain.decode(self._saved.values[name])
            for name in self._match.flat.setters
            if name in self._saved.values and self._match.chosen(name)
        }

    def finish(self, values: Mapping[str, Any]) -> None:
        """Restore optimizers, plain values, Stateful objects and per-rank values."""
        for attachment in self._match.attached.values():
            attachment.apply()
        flat, saved, chosen = self._match.flat, self._saved, self._match.chosen
        for name, value in values.items():
            flat.setters[name](value)
        for name, tree in flat.trees.items():
            if chosen(name) and (name in saved.values or tree.may_be_empty):
                tree.load(plain.decode(saved.values.get(name, {}), leaf=self._tree_leaf))
        for path in (*self._match.ranks.taken, *self._match.ranks.merged):
            if path in flat.rank_trees:
                flat.rank_trees[path].load(self._own(path))
        if flat.carried is not None:
            self._carry(flat.carried)

    def _carry(self, carried: CarriedRanks) -> None:
        """Keep the values of ranks that are gone, in place of those kept before."""
        carried.values = {
            name: self._match.carried_tree(name) for name in self._match.ranks.carried
        }
        carried.tensors = {
            fqn: local_of(self._match.tree_tensors[fqn])
            for fqn in stored_names(list(carried.values.values()))
        }

    def _own(self, path: str) -> Any:
        """Return this rank's value of ``path``: its own, that merged of all, or as it was built."""
        trees = self._saved.ranks.get(path, {})
        if path in self._match.ranks.taken:
            return plain.decode(trees[self._match.rank], leaf=self._tree_leaf)
        if path in self._match.ranks.merged:
            merge = self._match.flat.per_rank[path].on_resize
            assert callable(merge)
            every = [plain.decode(trees[r], leaf=self._tree_leaf) for r in sorted(trees)]
            return merge(every, self._match.rank, self._match.world_size)
        return plain.decode(
            self._match.flat.rank_values[own_name(path, self._match.rank)], leaf=self._live_leaf
        )

    def _tree_leaf(self, tag: str, payload: Any) -> Any:
        if tag == "$tensor":
            return self._match.tree_tensors[payload]
        if tag == "$array":
            return local_of(self._match.tree_tensors[payload]).numpy()
        if tag == "$rank":
            return self._own(payload)
        return decode_small_tensor(tag, payload)

    def _live_leaf(self, tag: str, payload: Any) -> Any:
        """Decode what was encoded from the live state a moment ago."""
        if tag not in ("$tensor", "$array"):
            return decode_small_tensor(tag, payload)
        live = local_of(self._match.flat.tensors[payload])
        return live if tag == "$tensor" else live.numpy()
