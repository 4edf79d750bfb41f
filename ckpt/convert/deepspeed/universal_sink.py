"""Sink of a conversion: a universal directory, which a DeepSpeed engine of any layout loads."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from holdfast.ckpt.checkpoints.commit import new_tag
from holdfast.ckpt.closing import Closing
from holdfast.ckpt.convert.deepspeed.directory import LATEST_UNIVERSAL, OPTIMIZER, PARAMETERS
from holdfast.ckpt.convert.deepspeed.engine_state import (
    KEPT_LOSS_SCALE,
    LOSS_SCALER,
    SCHEDULER,
)
from holdfast.ckpt.convert.deepspeed.universal_plan import (
    STEP,
    KeptTensor,
    TrainedState,
    UniversalPlan,
    plan_universal,
)
from holdfast.ckpt.convert.interchange import itemsize_of, nbytes_of
from holdfast.ckpt.errors import MismatchError, StateError
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.store.new_folder import NewFolder
from holdfast.ckpt.store.refusals import refusals
from holdfast.ckpt.types import Json

VERSION: Final = "0.19.8"
"""The DeepSpeed whose files these are like; an engine refuses files without a version."""

MODEL_FILES: Final = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""The same content twice: engines of stages 1 and 2 look for the first, of stage 3 the second."""


class UniversalSink(Closing):
    """Writes ``latest_universal`` and one tag below a new directory.

    Each trained parameter has a folder with its weights, moments and step. Frozen parameters,
    buffers, scheduler, counters and client state are in the model states. `finish` makes the
    complete directory visible, or nothing. Values that belong to one rank are left out.

    Raises ``MismatchError`` for a state that a DeepSpeed engine cannot have, and ``StoreError`` if
    the directory exists already.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._folder: NewFolder | None = None
        self._plan = UniversalPlan()
        self._specs: Mapping[str, TensorSpec] = {}
        self._rooms: dict[str, _TensorRoom] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._steps: dict[str, Any] = {}
        self._complete_names: set[str] = set()

    def begin(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        aliases: Mapping[str, str],
        values: Mapping[str, Json],
        step: int | None,
    ) -> None:
        """Refuse a state that does not fit, then start the directory."""
        self._plan = plan_universal(specs, aliases=aliases, values=values)
        self._steps = dict(self._plan.steps)
        self._plan.engine.setdefault("global_steps", step or 0)
        self._tag = f"global_step{self._plan.engine['global_steps']}"
        self._folder = NewFolder(self._path, tag=new_tag())
        self._specs = specs
        for fqn, spec in specs.items():
            if spec.dtype not in torch_dtypes.BY_NAME:
                raise MismatchError(f"{fqn}: this torch has no {spec.dtype}; select other tensors")
            if not nbytes_of(spec):
                self._complete(fqn, torch.empty(spec.shape, dtype=torch_dtypes.BY_NAME[spec.dtype]))

    def write(self, fqn: str, box: Box, data: memoryview) -> None:
        """Write a box; a tensor that is complete moves to its file."""
        if fqn not in self._rooms:
            self._rooms[fqn] = _TensorRoom(self._specs[fqn], self._started().path)
        if self._rooms[fqn].write(box, data):
            self._complete(fqn, self._rooms.pop(fqn).tensor())

    def _complete(self, fqn: str, tensor: torch.Tensor) -> None:
        place = self._plan.places[fqn]
        self._complete_names.add(fqn)
        if isinstance(place, KeptTensor):
            self._kept[fqn] = tensor
        elif place.key == STEP:
            self._steps[place.parameter] = tensor.clone()
        else:
            self._save({"param": tensor}, self._file(place))

    def finish(self) -> None:
        """Write the state of the engine, and make the directory visible."""
        folder = self._started()
        lost = [fqn for fqn in self._plan.places if fqn not in self._complete_names]
        if lost:
            raise StateError(
                f"{self._path}: {', '.join(lost[:3])} were not written; write every piece"
            )
        step = self._one_step()
        for group in self._plan.groups:
            for name in group if step is not None else ():
                self._save(step, self._file(TrainedState(parameter=name, key=STEP)))
        self._save(self._optimizer_state(step), f"{PARAMETERS}/{OPTIMIZER}")
        self._save(self._model_states(), MODEL_FILES[0])
        with refusals(folder.path, "write it"):
            _same_file(*(folder.path / self._tag / name for name in MODEL_FILES))
        folder.write(LATEST_UNIVERSAL, [self._tag.encode()])
        self._kept.clear()
        folder.publish()

    def _one_step(self) -> Any:
        """Return the step of the optimizer, None if it counts none.

        DeepSpeed keeps one for all. Raises ``MismatchError`` where parameters differ.
        """
        if not self._steps:
            return None
        first, step = next(iter(self._steps.items()))
        for name, other in self._steps.items():
            if float(other) != float(step):
                raise MismatchError(
                    f"ds-universal: {name} is at the optimizer's step {float(other):g}, {first} at "
                    f"{float(step):g}; a DeepSpeed engine has one step for all parameters"
                )
        return step

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for people: values that an engine does not take by itself as it loads."""
        found = []
        if (KEPT_LOSS_SCALE,) in self._plan.client:
            found.append(
                "The dynamic loss scale is in the client state. After load_checkpoint, an fp16 "
                f"engine takes it by vars(engine.optimizer.{LOSS_SCALER}).update("
                f"client[{KEPT_LOSS_SCALE!r}])."
            )
        if any(isinstance(step, torch.Tensor) for step in self._steps.values()):
            found.append(
                "An engine of ZeRO stage 3 lets all groups share one step tensor after loading: "
                "give each group its own, as docs/how-to/deepspeed.md shows."
            )
        if differing := sorted(
            {k for each in self._plan.settings for k in each} - {*self._common()}
        ):
            found.append(
                "An engine of ZeRO stage 3 keeps its own settings of these, in which the groups "
                f"differ: {', '.join(differing)}."
            )
        return tuple(found)

    def _common(self) -> dict[str, Any]:
        """Return the settings in which all groups agree."""
        return {
            key: item
            for key, item in self._plan.settings[0].items()
            if all(key in each and each[key] == item for each in self._plan.settings)
        }

    def _optimizer_state(self, step: Any) -> dict[str, Any]:
        """Return the global part of the optimizer's state, as stages 1 to 3 read it.

        An engine of stage 3 gives every group the settings of the first one it finds. So that one
        holds only settings in which all groups agree; the others stay as the script made them.
        """
        groups = [{**each, "params": [i]} for i, each in enumerate(self._plan.settings)]
        common = self._common()
        base = {
            "state": {i: {} if step is None else {STEP: step} for i in range(len(groups))},
            "param_groups": [{**common, "params": [i]} for i in range(len(groups))],
        }
        found = {"param_groups": groups, "optimizer_state_dict": base, "ds_version": VERSION}
        if self._plan.clip_grad is not None:
            found["clip_grad"] = self._plan.clip_grad
        return found

    def _model_states(self) -> dict[str, Any]:
        plan = self._plan
        module: dict[str, Any] = OrderedDict()
        client = dict(plan.client)
        for fqn, place in plan.places.items():
            if isinstance(place, KeptTensor):
                if place.of_module:
                    module[place.path[0]] = self._kept[fqn]
                else:
                    client[place.path] = self._kept[fqn]
        return {
            **_nested(client, self._path),
            "module": OrderedDict(module | plan.module_values),
            "buffer_names": list(module),
            "optimizer": None,
            "param_shapes": [
                OrderedDict((name, torch.Size(plan.shapes[name])) for name in group)
                for group in plan.groups
            ],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": plan.shared,
            SCHEDULER: plan.scheduler,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "mp_world_size": 1,
            "dp_world_size": 1,
            "ds_config": {},
            "ds_version": VERSION,
            **plan.engine,
        }

    def _file(self, place: TrainedState) -> str:
        return f"{PARAMETERS}/{place.parameter}/{place.key}.pt"

    def _save(self, content: object, name: str) -> None:
        path = self._started().path / self._tag / name
        with refusals(path, "write it"):
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, path)

    def _started(self) -> NewFolder:
        if self._folder is None:
            raise StateError("call begin() before bytes")
        return self._folder

    def close(self) -> None:
        """Remove an unfinished directory."""
        self._rooms.clear()
        self._kept.clear()
        if self._folder is not None:
            self._folder.close()


class _TensorRoom:
    """A nameless file for the boxes of one tensor, mapped."""

    def __init__(self, spec: TensorSpec, folder: Path) -> None:
        self._spec, self._left = spec, prod(spec.shape)
        nbytes = nbytes_of(spec)
        with (
            refusals(folder, f"make a file of {nbytes} bytes in it"),
            tempfile.TemporaryFile(dir=folder) as file,
        ):
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self._room = mmap.mmap(file.fileno(), nbytes)

    def write(self, box: Box, data: memoryview) -> bool:
        """Write a box; say whether the tensor is complete."""
        kind = np.dtype((np.void, itemsize_of(self._spec)))
        tensor = np.ndarray(self._spec.shape, kind, buffer=self._room)
        tensor[box.slices] = np.frombuffer(data, kind).reshape(box.shape)
        self._room.madvise(mmap.MADV_DONTNEED)  # the bytes stay in the file, not in our memory
        self._left -= box.size
        return self._left == 0

    def tensor(self) -> torch.Tensor:
        """Return the tensor, which keeps the file."""
        raw = torch.frombuffer(self._room, dtype=torch.uint8)
        return raw.view(torch_dtypes.BY_NAME[self._spec.dtype]).view(self._spec.shape)


def _same_file(path: Path, other: Path) -> None:
    """Make ``other`` a second name of a file, or a copy where the file system has none."""
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)


def _nested(entries: Mapping[tuple[str, ...], Any], target: object) -> dict[str, Any]:
    """Return entries by path as nested dicts; dicts with the keys 0, 1, … become lists."""
    found: dict[str, Any] = {}
    for path, item in entries.items():
        at = found
        for part in path[:-1]:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise MismatchError(f"{target}: the client state {'.'.join(path)} has two meanings")
        if path[-1] in at:
            raise MismatchError(f"{target}: two entries are called {'.'.join(path)}; rename one")
        at[path[-1]] = item
    deep = {path[:n] for path in entries for n in range(1, len(path))}
    return {key: _listed(item, (key,), deep) for key, item in found.items()}


def _listed(item: Any, path: tuple[str, ...], deep: set[tuple[str, ...]]) -> Any:
    if path not in deep:
        return item
    inner = {key: _listed(each, (*path, key), deep) for key, each in item.items()}
    if sorted(inner, key=lambda key: (len(key), key)) == [str(i) for i in range(len(inner))]:
        return [inner[str(i)] for i in range(len(inner))]
    return inner
