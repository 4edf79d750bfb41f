"""Lost stages of a pipeline, set from those beside them when memory has nothing else of them.

All ranks agree on the map of tensors when the state is tracked, from the modules that
``run.stages`` was given. A restore then fills each lost tensor with the mean of its counterparts;
its optimizer state stays as the optimizer makes it for a new parameter.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import msgspec
import torch
from torch import nn

from holdfast.ckpt.errors import CorruptError, MismatchError
from holdfast.ckpt.recovery.memory_source import MemorySource
from holdfast.ckpt.state import landing
from holdfast.ckpt.state.flatten import FlatState, flatten
from holdfast.ckpt.state.local_boxes import Leaf, empty_like, local_boxes_of, local_of, spec_of
from holdfast.ckpt.state.optimizers import state_prefix
from holdfast.ckpt.state.restore import RestoreReport, restore
from holdfast.ckpt.state.saved import SavedState
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.neighbors.layers import StageMap, StageTensor, map_stages
from holdfast.elastic.neighbors.marks import CURSOR, ApproximateMark
from holdfast.elastic.planning.neighbors import Needs

_log = logging.getLogger(__name__)

_SHOWN: Final = 4
_OFF: Final = "leave on_lost_state out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacing:
    """Sets lost stages from others by ``stages``, if other sources are over ``beyond`` steps older.

    ``needs`` are the places of the pipeline that can be replaced. ``rank`` of ``world_size`` is
    this rank.
    """

    stages: StageMap
    needs: Needs
    beyond: int
    rank: int
    world_size: int

    def fill(
        self,
        state: Mapping[str, Any],
        source: MemorySource,
        *,
        elsewhere: Collection[str],
        generation: int,
    ) -> tuple[RestoreReport, ApproximateMark]:
        """Restore this rank's part of an incomplete point; return the report and the mark.

        Raises ``CorruptError`` if the lost part is not that of whole stages that can be set from
        others; nothing has changed then.
        """
        saved, flat = SavedState.of(source), flatten(state, rank=self.rank)
        lost = self._lost(saved, source.origin)
        mine = {
            fqn: leaf for fqn, leaf in flat.tensors.items() if self.stages.stage_of.get(fqn) in lost
        }
        leave = [*mine, *(key for fqn in mine for key in _states_of(flat, fqn))]
        # what a lost rank builds again, no digest of which is left
        leave += [f for f in flat.left_out if f not in saved.values and f not in saved.specs]
        try:
            report = restore(
                state,
                source,
                rank=self.rank,
                world_size=self.world_size,
                elsewhere=elsewhere,
                leave=leave,
            )
        except MismatchError as error:  # a part that only the lost ranks had
            raise CorruptError(f"{source.origin}: {error}") from error
        read = sum(
            _set(fqn, leaf, self.stages.sources[fqn], source=source, saved=saved)
            for fqn, leaf in mine.items()
        )
        report = replace(report, bytes=report.bytes + read)
        near = {str(stage): self.stages.neighbors(stage) for stage in lost}
        return report, ApproximateMark(step=report.step, generation=generation, stages=near)

    def _lost(self, saved: SavedState, origin: str) -> list[int]:
        """Return the stages of which nothing is there. Raises ``CorruptError``."""
        there = _whole(saved)
        stages: dict[int, set[bool]] = defaultdict(set)
        for fqn, stage in self.stages.stage_of.items():
            stages[stage].add(fqn in there)
        lost = sorted(stage for stage, found in stages.items() if False in found)
        for stage in lost:
            if True in stages[stage]:
                raise CorruptError(
                    f"{origin}: a part of stage {stage} is there: the stages were cut in another "
                    "way when it was saved; use another restore point"
                )
            if why := self.stages.why(stage) or _beside(self.stages, stage, lost):
                raise CorruptError(f"{origin}: {why}; use another restore point")
        if not lost:
            raise CorruptError(f"{origin}: the lost ranks had no stage; use another restore point")
        return lost


def _beside(stages: StageMap, stage: int, lost: Collection[int]) -> str:
    near = [other for other in stages.neighbors(stage) if other in lost]
    return f"stages {stage} and {near[0]} are lost, which lie side by side" if near else ""


def _whole(saved: SavedState) -> set[str]:
    """Return the saved tensors of which all elements are there; no two chunks overlap."""
    counts: dict[str, int] = defaultdict(int)
    for index in saved.indexes:
        for fqn, entry in index.tensors.items():
            counts[fqn] += sum(chunk.box.size for chunk in entry.chunks)
    return {fqn for fqn, spec in saved.specs.items() if counts[fqn] == prod(spec.shape)}


def _states_of(flat: FlatState, fqn: str) -> Iterator[str]:
    """Yield the keys under which optimizers keep state of a parameter."""
    for name, parts in flat.optimizers.items():
        if any(member.fqn == fqn for group in parts.groups for member in group):
            yield state_prefix(name, fqn)[:-1]


@torch.no_grad()
def _set(
    fqn: str, leaf: Leaf, names: Sequence[str], *, source: MemorySource, saved: SavedState
) -> int:
    """Set a tensor to the mean of saved ones; one that has no fractions becomes the first.

    Returns the bytes read.
    """
    spec = spec_of(fqn, leaf)
    names = names if local_of(leaf).is_floating_point() else names[:1]
    rooms = [empty_like(leaf, dtype=local_of(leaf).dtype) for _ in names]
    targets = {}
    for name, room in zip(names, rooms, strict=True):
        there = saved.specs[name]
        if (there.dtype, there.shape) != (spec.dtype, spec.shape):
            raise CorruptError(
                f"{source.origin}: {name} was saved as {there.dtype} {list(there.shape)}, and "
                f"{fqn} is {spec.dtype} {list(spec.shape)}; use another restore point"
            )
        targets[name] = (there, [(each.box, each.local) for each in local_boxes_of(name, room)])
    nbytes = landing.fill(source, saved.indexes, targets)
    local, parts = local_of(leaf), [local_of(room) for room in rooms]
    if len(parts) == 1:
        local.copy_(parts[0])
        return nbytes
    wide = torch.float64 if local.dtype == torch.float64 else torch.float32
    local.copy_((parts[0].to(wide) + parts[1].to(wide)) / 2)
    return nbytes


# -- agreement -----------------------------------------------------------------------------------


def agree(
    world: GenerationWorld,
    state: Mapping[str, Any],
    *,
    stages: Mapping[int, nn.Module],
    beyond: int,
) -> Replacing:
    """Agree with all ranks on the stages that can be set from others; collective.

    ``stages`` are this rank's modules by the number of the stage. Raises ``ConfigError``, at every
    rank, for a state of which a lost part could not be set from others, with its names.
    """
    flat = flatten(state, rank=world.rank)
    staged = world.record.mesh.pp > 1
    offer: Json = {
        "problem": _problem(flat, stages) if staged else "",
        "stages": len(stages),
        "tensors": [list(each) for each in _tensors(flat, stages)],
        "values": sorted(flat.values.keys() - flat.left_out.keys()),
    }
    offers = world.gather(offer)
    if problem := next(filter(None, (each["problem"] for each in offers)), ""):
        raise ConfigError(f"on_lost_state: {problem}")
    tensors = [msgspec.convert(t, StageTensor) for each in offers for t in each["tensors"]]
    count = int(offers[0]["stages"]) * world.record.mesh.pp
    found = map_stages(tensors, count=count)
    if staged and (objection := found.objection()):
        raise ConfigError(
            f"on_lost_state: these tensors could not be set from the neighbouring stages: "
            f"{objection}; cut the model into stages of equal layers, whose names have the number "
            f"of the layer, or {_OFF}"
        )
    if staged and world.rank == 0 and world.generation == 1:
        for stage in sorted(found.unlike):
            _log.warning(
                "on_lost_state: the run goes back if a stage is lost: %s", found.why(stage)
            )
    places = [world.record.snapshots.place_of(rank) for rank in range(world.size)]
    return Replacing(
        stages=found,
        needs=_needs(found, pp=world.record.mesh.pp, only=_only(offers, places)),
        beyond=beyond,
        rank=world.rank,
        world_size=world.size,
    )


def _ids(module: nn.Module) -> Iterator[int]:
    yield from (id(each) for each in module.parameters())
    yield from (id(each) for each in module.buffers())


def _tensors(flat: FlatState, stages: Mapping[int, nn.Module]) -> Iterator[StageTensor]:
    """Yield the tensors of this rank's stages, by their names in the state."""
    stage_of = {found: stage for stage, module in stages.items() for found in _ids(module)}
    for fqn, leaf in flat.tensors.items():
        if (stage := stage_of.get(id(leaf))) is not None:
            spec = spec_of(fqn, leaf)
            yield StageTensor(fqn, stage, spec.dtype, spec.shape)


def _problem(flat: FlatState, stages: Mapping[int, nn.Module]) -> str:
    """Return which part of the state no neighbour could give, with the remedy; "" if none."""
    if not stages:
        return "call run.stage(module) or run.stages(modules) before run.track"
    if own := [name for name in flat.per_rank if name != CURSOR]:
        return (
            f"{_some(own)} belongs to each rank (PerRank), and a lost rank's cannot be made good; "
            f"track none, or {_OFF}"
        )
    frozen = {id(p) for m in stages.values() for p in m.parameters() if not p.requires_grad}
    if fixed := [fqn for fqn, leaf in flat.tensors.items() if id(leaf) in frozen]:
        return (
            f"{_some(fixed)} is frozen, and the mean of others would be no such weights; track the "
            f"module as holdfast.Rebuilt(module), which builds it again, or {_OFF}"
        )
    known = {each.fqn for each in _tensors(flat, stages)}
    known |= {key for parts in flat.optimizers.values() for key in parts.keys}
    if loose := [fqn for fqn in flat.tensors if fqn not in known and fqn not in flat.own]:
        return (
            f"{_some(loose)} is no parameter or buffer of a stage, so no other stage has the like; "
            f"track only the stages and torch optimizers, or {_OFF}"
        )
    return ""


def _some(names: Sequence[str]) -> str:
    more = f" (and {len(names) - _SHOWN} more)" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _only(offers: Sequence[Mapping[str, Any]], places: Sequence[int]) -> set[int]:
    """Return the places whose ranks write plain values: the lowest rank with a value writes it."""
    written: dict[str, int] = {}
    for offer, place in zip(offers, places, strict=True):
        for name in offer["values"]:
            written.setdefault(name, place)
    return set(written.values())


def _needs(stages: StageMap, *, pp: int, only: Collection[int]) -> Needs:
    """Return the places that can be replaced, each with the places of its stages' neighbours."""
    needs = {}
    for place in set(range(pp)) - set(only):
        own = range(place, stages.count, pp)
        near = {other % pp for stage in own for other in stages.neighbors(stage)}
        if place not in near and set(own) <= set(stages.replaceable):
            needs[place] = near
    return needs
