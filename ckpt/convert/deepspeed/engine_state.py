"""The content of DeepSpeed's ``*_model_states.pt``: module, shapes, counters and client state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, TypeAlias

import torch

from holdfast.ckpt.convert.deepspeed.mapped import MappedTensor, joined_tensor, whole_tensor
from holdfast.ckpt.convert.deepspeed.partitions import sharded, sharded_size
from holdfast.ckpt.convert.deepspeed.pickles import PickledState
from holdfast.ckpt.state import plain, torch_dtypes
from holdfast.ckpt.types import Json

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The shapes of the parameters of one flat group, in the order in which they lie."""

MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"
SCHEDULER: Final = "lr_scheduler"
CLIENT: Final = "client"
ENGINE: Final = "deepspeed"
LOSS_SCALER: Final = "loss_scaler"
KEPT_LOSS_SCALE: Final = f"{ENGINE}_{LOSS_SCALER}"
"""The entry of a universal directory's client state that has a dynamic loss scale, as a dict."""

COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps")
SETTINGS: Final = ("data_sampler", "random_ltd", "ds_config", "ds_version", "dp_world_size")
_LAYOUT: Final = (
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "mp_world_size", "checkpoint_parallel_dimensions",
    "sparse_tensor_module_names", "csr_tensor_module_names", "num_experts", "ds_autoep_layers",
    "autoep_layers", "universal_checkpoint_info",
)  # fmt: skip
_EXPERTS: Final = ("num_experts", "ds_autoep_layers", "autoep_layers")
_PARALLEL: Final = ("mp_world_size",)
RESERVED_KEYS: Final = frozenset({*_LAYOUT, *COUNTERS, *SETTINGS, SCHEDULER, KEPT_LOSS_SCALE})
"""Keys that DeepSpeed itself or Holdfast writes into its model states."""
_NAMED: Final = frozenset({MODEL, OPTIMIZER, SCHEDULER, CLIENT, ENGINE})
_MOST_DIMS: Final = 64


class EngineState:
    """The model states of one checkpoint, of all ranks that wrote some."""

    def __init__(self, files: Sequence[PickledState], *, per_rank: bool) -> None:
        self.files, self.per_rank = files, per_rank
        self.first = files[0]
        self._refuse()
        self.groups: list[Shapes] = [
            self._shapes("param_shapes", group) for group in self.first.need("param_shapes", list)
        ]
        self.trained = frozenset(name for group in self.groups for name in group)
        if len(self.trained) != sum(map(len, self.groups)):
            raise self.first.damaged("'param_shapes' has a name in two groups")
        self.module: Mapping[str, Any] = self.first.need("module", Mapping)
        self.aliases = self._aliases()

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks of the run."""
        return int(self.first.need("dp_world_size", int))

    @property
    def step(self) -> int:
        """The number of optimizer steps."""
        step = self.first.need("global_steps", int)
        if step < 0:
            raise self.first.damaged(f"'global_steps' is {step}")
        return int(step)

    def _refuse(self) -> None:
        remedy = "export its weights with the code that wrote it"
        for key in _EXPERTS:
            found = self.first.content.get(key)
            if found and found != [0]:
                raise self.first.refused(f"{key} is {found!r}: experts are not read", remedy)
        for key in _PARALLEL:
            if (found := self.first.content.get(key, 1)) != 1:
                raise self.first.refused(f"{key} is {found!r}: only 1 is read", remedy)
        if self.first.content.get("module") is None:
            raise self.first.refused("has no module: a pipeline's layers are not read", remedy)
        if self.first.content.get("param_shapes") is None:
            raise self.first.refused(
                "has no 'param_shapes': it was saved without ZeRO or by a very old DeepSpeed",
                "convert the file with --from torch --select 'module.*'",
            )

    def _shapes(self, key: str, group: object) -> Shapes:
        if not isinstance(group, Mapping):
            raise self.first.damaged(f"{key!r} holds a {type(group).__name__}")
        found = {}
        for name, shape in group.items():
            if not isinstance(name, str) or not name or not isinstance(shape, tuple | list):
                raise self.first.damaged(f"{key!r} has {name!r}: {shape!r}")
            if len(shape) > _MOST_DIMS or not all(
                isinstance(n, int) and 0 <= n < 1 << 63 for n in shape
            ):
                raise self.first.damaged(f"{key!r}: {name} has the shape {list(shape)}")
            found[name] = tuple(shape)
        return found

    def _aliases(self) -> dict[str, str]:
        """Return the tied names. Empty tensors only seem to share memory."""
        found = {}
        for name, stored in (self.first.get("shared_params", Mapping) or {}).items():
            if not isinstance(name, str) or not isinstance(stored, str) or name in self.trained:
                raise self.first.damaged(f"'shared_params' has {name!r}: {stored!r}")
            there = self.module.get(name)
            if self.per_rank or not isinstance(there, torch.Tensor) or there.numel():
                found[name] = stored
        return found

    def tensors(self) -> Iterator[MappedTensor]:
        """Yield parameters that are not trained, and buffers; rank 0's where ranks differ."""
        fragments = self.first.get("frozen_param_fragments", Mapping) or {}
        shapes = self._shapes(
            "frozen_param_shapes", self.first.get("frozen_param_shapes", Mapping) or {}
        )
        buffers = self.first.get("buffer_names", list) or []
        for name, found in self.module.items():
            if name in self.trained or name in self.aliases:
                continue
            fqn = f"{MODEL}.{name}"
            if not isinstance(found, torch.Tensor):
                continue
            if self.per_rank and name in fragments:
                if name not in shapes:
                    raise self.first.damaged(f"{name} has no shape")
                yield self._frozen(fqn, name, shapes[name])
            elif self.per_rank and name not in buffers and not found.numel():
                raise self.first.damaged(f"{name} is neither trained, frozen nor a buffer")
            else:
                yield whole_tensor(fqn, found, self.first)

    def _frozen(self, fqn: str, name: str, shape: tuple[int, ...]) -> MappedTensor:
        vectors = []
        for file in self.files:
            part = file.need("frozen_param_fragments", Mapping).get(name)
            vector = flat_vector(file, part, f"frozen parameter {name}")
            if vector.numel() != (size := sharded_size(prod(shape), len(self.files))):
                raise file.damaged(
                    f"frozen parameter {name} has a part of {vector.numel()} elements, {size} are "
                    "needed"
                )
            vectors.append(vector)
        check_alike(self.files, vectors, name)
        parts = sharded([prod(shape)], ranks=len(self.files))
        return joined_tensor(fqn, parts[0], vectors, shape=shape)

    def client(self) -> Iterator[tuple[str, object]]:
        """Yield the entries that the training script gave ``save_checkpoint``, by their names."""
        for key, item in self.first.content.items():
            if key in RESERVED_KEYS:
                continue
            if not isinstance(key, str) or not key:
                raise self.first.refused(
                    f"the client state has the key {key!r}", "give its entries names"
                )
            yield (f"{CLIENT}.{key}" if key.partition(".")[0] in _NAMED else key), item

    def values(self) -> dict[str, Json]:
        """Return counters, settings, the scheduler and the module's plain values, encoded."""
        found: dict[str, Json] = {}
        for key in (*COUNTERS, *SETTINGS):
            if self.first.content.get(key) is not None:
                found[f"{ENGINE}.{key}"] = self.encoded(key, self.first.content[key])
        if self.first.content.get(SCHEDULER) is not None:
            found[SCHEDULER] = self.encoded(SCHEDULER, self.first.content[SCHEDULER])
        for name, item in self.module.items():
            if not isinstance(item, torch.Tensor):
                found[f"{MODEL}.{name}"] = self.encoded(name, item)
        return found

    def kept_loss_scale(self) -> dict[str, Json]:
        """Return the dynamic loss scale that Holdfast put into a universal directory, encoded."""
        kept = self.first.get(KEPT_LOSS_SCALE, Mapping)
        if kept is None:
            return {}
        return {f"{ENGINE}.{LOSS_SCALER}": self.encoded(KEPT_LOSS_SCALE, dict(kept))}

    def encoded(self, key: str, item: object) -> Json:
        """Return a plain value as JSON. Raises ``StateError`` for any other."""
        return plain.encode(item, f"{self.first.path}: {key}")


def flat_vector(file: PickledState, found: object, what: str) -> torch.Tensor:
    """Return a flat tensor of a file. Raises ``CorruptError`` for anything else."""
    if not isinstance(found, torch.Tensor):
        raise file.damaged(f"{what} is a {type(found).__name__}, no tensor")
    found = found.detach()
    if found.dtype not in torch_dtypes.NAME_OF or found.layout != torch.strided or found.is_meta:
        raise file.damaged(f"{what} is of {found.dtype}, which is not plain numbers")
    if not found.is_contiguous() or found.numel() * found.itemsize > file.file_bytes:
        raise file.damaged(f"{what} {list(found.shape)} is not one run of numbers")
    return found.reshape(-1)


def check_alike(files: Sequence[PickledState], vectors: Sequence[torch.Tensor], what: str) -> None:
    """Raise ``CorruptError`` if the ranks saved numbers of different types."""
    for file, vector in zip(files, vectors, strict=True):
        if vector.dtype != vectors[0].dtype:
            raise file.damaged(f"{what} is of {vector.dtype}, rank 0 has {vectors[0].dtype}")
