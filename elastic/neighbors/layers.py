"""The counterparts of a stage's tensors in the stages beside it, found by their names.

Tensors have the names of the whole model. The first number in a name is that of the layer:
``model.layers.7.mlp.weight`` lies in layer 7 of ``model.layers``. The counterpart of the k-th layer
of a stage is the k-th layer of another, and of a tensor in it, the tensor of the same name, shape
and dtype there. A tensor without a number in its name, such as an embedding, has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

_SHOWN = 4


class StageTensor(NamedTuple):
    """A tensor of a stage: its name in the state, its torch dtype and its global shape."""

    fqn: str
    stage: int
    dtype: str
    shape: tuple[int, ...]


_Key: TypeAlias = tuple[str, int, str]
"""The names before a layer's number, the layer's place in its stage, and the names behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMap:
    """The stages of a pipeline, and the tensors from which each can be set.

    ``count`` is the number of stages. ``sources`` maps every tensor that has counterparts in all
    neighbouring stages to their names, the one of the earlier stage first. ``unlike`` has, by
    stage, the tensors that have not, each with the reason. ``stage_of`` maps every tensor.
    """

    count: int
    stage_of: Mapping[str, int]
    sources: Mapping[str, tuple[str, ...]]
    unlike: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def replaceable(self) -> tuple[int, ...]:
        """The stages of which every tensor has its counterparts."""
        found = set(self.stage_of.values()) - self.unlike.keys()
        return tuple(sorted(found)) if self.count > 1 else ()

    def neighbors(self, stage: int) -> tuple[int, ...]:
        """Return the stages beside one: two, or one of the first and of the last."""
        return tuple(near for near in (stage - 1, stage + 1) if 0 <= near < self.count)

    def objection(self) -> str:
        """Return the tensors that keep an inner stage, or all stages, from being set; else ""."""
        inner = [stage for stage in self.unlike if 0 < stage < self.count - 1]
        wrong = inner or ([] if self.replaceable else sorted(self.unlike))
        return "; ".join(self.why(stage) for stage in sorted(wrong))

    def why(self, stage: int) -> str:
        """Return why a stage cannot be set from its neighbours, in words; "" if it can."""
        found = self.unlike.get(stage, ())
        more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f"stage {stage}: {', '.join(found[:_SHOWN])}{more}" if found else ""


def map_stages(tensors: Iterable[StageTensor], *, count: int) -> StageMap:
    """Return the counterparts of all tensors of ``count`` stages.

    Ranks that hold the same stage name its tensors again; a repetition changes nothing.
    """
    found = sorted(set(tensors))
    by_key = {stage: _keys([t for t in found if t.stage == stage]) for stage in range(count)}
    sources: dict[str, tuple[str, ...]] = {}
    unlike: dict[int, tuple[str, ...]] = {}
    bare = StageMap(count=count, stage_of={t.fqn: t.stage for t in found}, sources={})
    for stage, own in by_key.items():
        problems = []
        for key, tensor in own.items():
            near = bare.neighbors(stage)
            wrong = _problem(key, tensor, near=near, by_key=by_key)
            if wrong:
                problems.append(f"{tensor.fqn} ({wrong})")
            else:
                sources[tensor.fqn] = tuple(by_key[other][key].fqn for other in near)
        if problems:
            unlike[stage] = tuple(problems)
    return StageMap(count=count, stage_of=bare.stage_of, sources=sources, unlike=unlike)


def _problem(
    key: _Key,
    tensor: StageTensor,
    *,
    near: Sequence[int],
    by_key: Mapping[int, Mapping[_Key, StageTensor]],
) -> str:
    """Return why a tensor has no counterpart in one of the stages ``near``, in words."""
    if key[1] < 0:
        return "no number of a layer in its name"
    for other in near:
        there = by_key[other].get(key)
        if there is None:
            return f"no counterpart in stage {other}"
        if (there.dtype, there.shape) != (tensor.dtype, tensor.shape):
            mine, theirs = _shape(tensor), _shape(there)
            return f"{mine}, {there.fqn} of stage {other} is {theirs}"
    return "" if near else "there is no other stage"


def _shape(tensor: StageTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _keys(tensors: Collection[StageTensor]) -> dict[_Key, StageTensor]:
    """Return a stage's tensors by the place of their layer; -1 for none."""
    split = [(_split(tensor.fqn), tensor) for tensor in tensors]
    layers: dict[str, set[int]] = {}
    for (before, number, _), _ in split:
        if number >= 0:
            layers.setdefault(before, set()).add(number)
    places = {
        (before, number): place
        for before, numbers in layers.items()
        for place, number in enumerate(sorted(numbers))
    }
    return {
        (before, places.get((before, number), -1), behind): tensor
        for (before, number, behind), tensor in split
    }


def _split(fqn: str) -> _Key:
    """Return the names before the first number, the number (-1: none), and the names behind it."""
    parts = fqn.split(".")
    for at, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:at]), int(part), ".".join(parts[at + 1 :])
    return fqn, -1, ""
