"""Source of a conversion: a universal directory, of DeepSpeed's own converter or of Holdfast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.ckpt.convert.deepspeed.directory import (
    LATEST_UNIVERSAL,
    OPTIMIZER,
    PARAMETERS,
    rank_files,
    tag_of,
)
from holdfast.ckpt.convert.deepspeed.engine_state import MODEL, EngineState
from holdfast.ckpt.convert.deepspeed.engine_state import OPTIMIZER as OPTIMIZER_NAME
from holdfast.ckpt.convert.deepspeed.flat_groups import group_values, scaling_values
from holdfast.ckpt.convert.deepspeed.mapped import MappedTensor, whole_tensor
from holdfast.ckpt.convert.deepspeed.pickles import PickledState
from holdfast.ckpt.convert.deepspeed.universal_plan import STEP, WEIGHT
from holdfast.ckpt.convert.deepspeed.zero_source import NamedTensors
from holdfast.ckpt.convert.torch_save import load_file
from holdfast.ckpt.errors import CorruptError, NotFoundError, StateError
from holdfast.ckpt.state import plain
from holdfast.ckpt.types import Json

_SUFFIX: Final = ".pt"
_SPLIT: Final = ("vocab_tensor", "param_n_sub_params", "sub_param_shape")
"""Marks of parameters that tensor parallelism had split or padded."""


class UniversalSource(NamedTensors):
    """A universal checkpoint: a tag's directory, or a root with ``latest_universal``.

    Names are those of `ZeroSource`. Raises ``StateError`` naming a class that is refused.
    """

    def __init__(self, path: str | Path) -> None:
        tag = tag_of(path, latest=LATEST_UNIVERSAL)
        self._folder = tag / PARAMETERS
        if not (self._folder / OPTIMIZER).is_file():
            raise NotFoundError(
                f"{tag}: has no {PARAMETERS}/{OPTIMIZER}; a universal checkpoint has one. Give "
                "the directory of its tag, or convert it with --from ds-zero"
            )
        files = rank_files(tag, optimizers=False)
        engine = EngineState(
            [PickledState.load(file) for file in files.models], per_rank=files.per_rank
        )
        super().__init__(f"universal checkpoint {tag}", step=engine.step)
        self._state = PickledState.load(self._folder / OPTIMIZER)
        self._files = {name: self._parameter(name) for name in sorted(engine.trained)}
        base = self._state
        if "param_groups" not in base.content:
            base = base.within("optimizer_state_dict")
        for group in engine.groups:
            for name, shape in group.items():
                self.add(self._tensors_of(name, shape))
        self.add_values(group_values(base, engine.groups))
        for number, group in enumerate(engine.groups):
            for name in group:
                self._add_step(number, name)
        self.add_values(engine.kept_loss_scale() | scaling_values(self._state))
        self.add_engine(engine)

    def _parameter(self, name: str) -> dict[str, Path]:
        """Return the files of a parameter by their keys."""
        folder = self._folder / name
        if (
            not name
            or "/" in name
            or name in (".", "..")
            or not (folder / f"{WEIGHT}.pt").is_file()
        ):
            raise CorruptError(
                f"{folder}: has no {WEIGHT}.pt, and the model states list the parameter; restore "
                "it from a copy"
            )
        return {path.stem: path for path in sorted(folder.iterdir()) if path.suffix == _SUFFIX}

    def _tensors_of(self, name: str, shape: tuple[int, ...]) -> Iterator[MappedTensor]:
        for key, path in self._files[name].items():
            if key == STEP:
                continue
            fqn = f"{MODEL}.{name}"
            if key != WEIGHT:
                fqn = f"{OPTIMIZER_NAME}.state.{MODEL}.{name}.{key}"
            yield _tensor_file(fqn, path, shape)

    def _add_step(self, number: int, name: str) -> None:
        """Add a parameter's step: its own file's, or that of its group (as of stage 3)."""
        path, fqn = self._files[name].get(STEP), f"{OPTIMIZER_NAME}.state.{MODEL}.{name}.{STEP}"
        file = self._state
        if path is not None:
            found, file_bytes = load_file(path, f"DeepSpeed file {path}")
            file = PickledState(path, {}, file_bytes=file_bytes)
        else:
            base = self._state.content.get("optimizer_state_dict") or {}
            states = base.get("state") if isinstance(base, Mapping) else None
            state = states.get(number) if isinstance(states, Mapping) else None
            found = state.get(STEP) if isinstance(state, Mapping) else None
        if isinstance(found, torch.Tensor):
            self.add([whole_tensor(fqn, found, file)])
        elif found is not None:
            value: Json = plain.encode(found, f"{file.path}: {STEP}")
            self.add_values({fqn: value})


def _tensor_file(fqn: str, path: Path, shape: tuple[int, ...]) -> MappedTensor:
    content, file_bytes = load_file(path, f"DeepSpeed file {path}")
    file = PickledState(path, {}, file_bytes=file_bytes)
    found: Any = content
    if isinstance(content, Mapping):
        for mark in _SPLIT:
            if (found := content.get(mark)) and (found is True or found != 1):
                raise StateError(
                    f"{path}: {mark} is {found!r}: the parameter was split by tensor "
                    "parallelism, which is not read; export it with the code that wrote it"
                )
        found = content.get("param")
    if not isinstance(found, torch.Tensor):
        raise file.damaged(f"holds a {type(found).__name__} for {fqn}, no tensor")
    return whole_tensor(fqn, found, file, shape=shape)
