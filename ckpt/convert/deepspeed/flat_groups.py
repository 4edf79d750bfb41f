"""The optimizer state of all ranks: flat groups, cut into named tensors and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch

from holdfast.ckpt.convert.deepspeed.engine_state import (
    ENGINE,
    LOSS_SCALER,
    MODEL,
    OPTIMIZER,
    Shapes,
    check_alike,
    flat_vector,
)
from holdfast.ckpt.convert.deepspeed.mapped import MappedTensor, joined_tensor, whole_tensor
from holdfast.ckpt.convert.deepspeed.partitions import (
    Parts,
    fault_of_parts,
    packed,
    recorded,
    sharded,
    sharded_size,
)
from holdfast.ckpt.convert.deepspeed.pickles import LossScale, PickledState
from holdfast.ckpt.state import plain
from holdfast.ckpt.types import Json

_BY_WEIGHTS: Final = 3
"""The stage that cuts each parameter by itself."""


class FlatGroups:
    """The flat groups of a checkpoint; ``shapes`` are their parameters, group by group."""

    def __init__(self, files: Sequence[PickledState], shapes: Sequence[Shapes]) -> None:
        self.shapes, self.ranks = shapes, len(files)
        self.states = [file.within("optimizer_state_dict") for file in files]
        self.first = self.states[0]
        self.stage = _stage(self.first)
        for file, state in zip(files, self.states, strict=True):
            refuse_settings(file)
            if _stage(state) != self.stage:
                raise state.damaged("was saved by another stage of ZeRO than rank 0's file")
            self._check_partitions(state)
        self.by_weights = self.stage >= _BY_WEIGHTS
        key = "fp32_flat_groups" if self.by_weights else "single_partition_of_fp32_groups"
        self.weights = [self._vectors(state, key) for state in self.states]
        self.parts = [self._parts(number) for number in range(len(shapes))]
        self.base = [self._base(state) for state in self.states]

    def _check_partitions(self, state: PickledState) -> None:
        counts = state.get("partition_count", (int, list)) or self.ranks
        for count in counts if isinstance(counts, list) else [counts]:
            if count != self.ranks:
                raise state.refused(
                    f"'partition_count' is {count}, and {self.ranks} ranks saved (as with "
                    "experts), which is not read",
                    "export its weights with engine.save_16bit_model",
                )

    def _vectors(self, state: PickledState, key: str) -> list[torch.Tensor]:
        found = state.need(key, list)
        if len(found) != len(self.shapes):
            raise state.damaged(
                f"{key!r} has {len(found)} groups, 'param_shapes' has {len(self.shapes)}"
            )
        return [flat_vector(state, part, f"{key}[{i}]") for i, part in enumerate(found)]

    def _parts(self, number: int) -> Sequence[Parts]:
        shapes = self.shapes[number]
        counts = {name: prod(shape) for name, shape in shapes.items()}
        vectors = [weights[number] for weights in self.weights]
        check_alike(self.states, vectors, f"group {number}")
        lengths = [vector.numel() for vector in vectors]
        if self.by_weights:
            needed = sum(sharded_size(count, self.ranks) for count in counts.values())
            for state, length in zip(self.states, lengths, strict=True):
                if length != needed:
                    raise state.damaged(
                        f"group {number} has {length} elements, its parameters need {needed}"
                    )
            parts = sharded(list(counts.values()), ranks=self.ranks)
        elif all("param_slice_mappings" in state.content for state in self.states):
            slices = [_slices(state, number) for state in self.states]
            parts = recorded(list(counts), slices)
        else:
            parts = packed(list(counts.values()), size=max(lengths) or 1)
        if fault := fault_of_parts(counts, parts, lengths=lengths):
            raise self.first.damaged(f"group {number}: {fault}")
        return parts

    def _base(self, state: PickledState) -> PickledState:
        key = "optimizer_state_dict" if self.by_weights else "base_optimizer_state"
        if isinstance(state.content.get(key), list):
            raise state.refused(
                f"{key!r} is of elastic_checkpoint, which is not read",
                "load it with its DeepSpeed, and save it with elastic_checkpoint false",
            )
        base = state.within(key)
        base.need("state", Mapping)
        check_groups(base, len(self.shapes))
        return base

    def tensors(self) -> Iterator[MappedTensor]:
        """Yield the weights and each partitioned state, as whole tensors."""
        for number, shapes in enumerate(self.shapes):
            vectors = [weights[number] for weights in self.weights]
            for (name, shape), parts in zip(shapes.items(), self.parts[number], strict=True):
                yield joined_tensor(f"{MODEL}.{name}", parts, vectors, shape=shape)
            for key, found in self._state(number).items():
                yield from self._state_tensors(number, key, found)

    def _state(self, number: int) -> dict[str, list[Any]]:
        """Return a group's state: each key with the entries of all ranks."""
        states = [base.content["state"].get(number, {}) for base in self.base]
        for base, state in zip(self.base, states, strict=True):
            if not isinstance(state, Mapping) or state.keys() != states[0].keys():
                raise base.damaged(f"the optimizer's state of group {number} has other keys")
        for key in states[0]:
            if not isinstance(key, str) or not key or "." in key:
                raise self.base[0].refused(f"state key {key!r}", "use simple names")
        return {key: [state[key] for state in states] for key in states[0]}

    def _state_tensors(self, number: int, key: str, found: list[Any]) -> Iterator[MappedTensor]:
        shapes = self.shapes[number]
        if not isinstance(found[0], torch.Tensor):
            return
        if found[0].ndim == 0:
            self._check_equal(number, key, found)
            for name in shapes:
                yield whole_tensor(_state_name(name, key), found[0], self.first)
            return
        what = f"state {key!r} of group {number}"
        vectors = [
            flat_vector(base, item, what) for base, item in zip(self.base, found, strict=True)
        ]
        check_alike(self.base, vectors, what)
        lengths = [weights[number].numel() for weights in self.weights]
        for base, vector, own in zip(self.base, vectors, lengths, strict=True):
            if vector.numel() not in (own, max(lengths)):  # padding is stripped from weights only
                raise base.refused(
                    f"{what} has {vector.numel()} elements and the weights have {own}: this "
                    "optimizer keeps states of other shapes, which are not read",
                    "convert the weights of a checkpoint that an Adam or SGD saved",
                )
        for (name, shape), parts in zip(shapes.items(), self.parts[number], strict=True):
            yield joined_tensor(_state_name(name, key), parts, vectors, shape=shape)

    def _check_equal(self, number: int, key: str, found: list[Any]) -> None:
        for base, item in zip(self.base, found, strict=True):
            same = type(item) is type(found[0])
            if same and isinstance(item, torch.Tensor):
                same = item.dtype == found[0].dtype and torch.equal(item, found[0])
            elif same:
                same = item == found[0]
            if not same:
                raise base.damaged(
                    f"state {key!r} of group {number} is {item!r}, rank 0 has {found[0]!r}: the "
                    "files are of different steps"
                )

    def values(self) -> dict[str, Json]:
        """Return the groups' settings, plain states and the engine's own, encoded."""
        found: dict[str, Json] = {}
        for number, shapes in enumerate(self.shapes):
            for key, items in self._state(number).items():
                if not isinstance(items[0], torch.Tensor):
                    self._check_equal(number, key, items)
                    for name in shapes:
                        found[_state_name(name, key)] = self._encoded(key, items[0])
        found |= group_values(self.base[0], self.shapes)
        found |= scaling_values(self.first)
        found[f"{ENGINE}.zero_stage"] = self.stage
        return found

    def _encoded(self, key: str, item: object) -> Json:
        return plain.encode(item, f"{self.first.path}: {key}")


def _stage(state: PickledState) -> int:
    """Return the stage; an optimizer of stage 1 for bf16 does not record it."""
    return int(state.get("zero_stage", int) or 1)


def ranks_that_saved(files: Sequence[PickledState], ranks: int) -> int:
    """Return the number of ranks that saved: all ``ranks``, or with MiCS those of the first group.

    MiCS cuts the state over the ranks of a group, and the other groups have copies of it.
    """
    count = files[0].within("optimizer_state_dict").get("partition_count", (int, list))
    if not isinstance(count, int) or not len(files) <= count < ranks or ranks % count:
        return ranks
    return count


def check_groups(base: PickledState, flats: int) -> None:
    """Raise ``CorruptError`` unless the groups have the flat parameters once, in their order."""
    numbers: list[object] = []
    for group in base.need("param_groups", list):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            raise base.damaged("'param_groups' has an entry without 'params'")
        numbers += group["params"]
    if numbers != list(range(flats)):
        raise base.damaged(f"its groups have the parameters {numbers}, {flats} are needed in order")


def group_values(base: PickledState, shapes: Sequence[Shapes]) -> dict[str, Json]:
    """Return the settings of the parameter groups, under the names that Holdfast gives them."""
    check_groups(base, len(shapes))
    found: dict[str, Json] = {}
    for number, group in enumerate(base.need("param_groups", list)):
        start = f"{OPTIMIZER}.groups.{number}"
        names = [f"{MODEL}.{name}" for i in group["params"] for name in shapes[i]]
        found[f"{start}.params"] = list(names)
        for key, item in group.items():
            if key == "params":
                continue
            if isinstance(item, torch.Tensor) and item.ndim == 0:
                item = item.item()  # noqa: PLW2901
            found[f"{start}.{key}"] = plain.encode(
                item, f"{base.path}: param_groups.{number}.{key}"
            )
    return found


def scaling_values(state: PickledState) -> dict[str, Json]:
    """Return the clipping of gradients and the dynamic loss scale (fp16), encoded.

    A static loss scale is a setting of the configuration and no state.
    """
    found: dict[str, object] = {}
    if state.content.get("clip_grad") is not None:
        found["clip_grad"] = state.content["clip_grad"]
    if state.content.get("dynamic_loss_scale"):
        found[LOSS_SCALER] = dict(vars(state.need(LOSS_SCALER, LossScale)))
    return {
        f"{ENGINE}.{key}": plain.encode(item, f"{state.path}: {key}") for key, item in found.items()
    }


def refuse_settings(file: PickledState) -> None:
    """Refuse a configuration under which the files do not hold the state as is."""
    settings = file.content.get("ds_config")
    zero = settings.get("zero_optimization") if isinstance(settings, Mapping) else None
    if not isinstance(zero, Mapping):  # a path to a file, maybe: the layout is checked in any case
        return
    if zero.get("zero_quantized_nontrainable_weights"):
        raise file.refused(
            "zero_quantized_nontrainable_weights: frozen weights are stored quantized",
            "export its weights with engine.save_16bit_model, or train with this setting left out",
        )
    for key in ("offload_optimizer", "offload_param"):
        offload = zero.get(key) or {}
        if isinstance(offload, Mapping) and offload.get("device") == "nvme":
            raise file.refused(
                f"{key} is on nvme: parts of the state lie in other files",
                f"load it with {key} on the cpu, and save it again",
            )


def _slices(state: PickledState, number: int) -> dict[str, tuple[int, int]]:
    """Return the start and the count of each parameter's part in a rank's vector."""
    groups = state.need("param_slice_mappings", list)
    if number >= len(groups) or not isinstance(groups[number], Mapping):
        raise state.damaged(f"'param_slice_mappings' has no group {number}")
    found = {}
    for name, address in groups[number].items():
        start, count = (getattr(address, key, None) for key in ("start", "numel"))
        if not isinstance(start, int) or not isinstance(count, int):
            raise state.damaged(f"'param_slice_mappings' has {start}, {count} for {name}")
        found[name] = (start, count)
    return found


def _state_name(name: str, key: str) -> str:
    return f"{OPTIMIZER}.state.{MODEL}.{name}.{key}"
