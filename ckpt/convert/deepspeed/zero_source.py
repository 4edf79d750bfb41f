"""Source of a conversion: a directory that DeepSpeed's ``save_checkpoint`` wrote with ZeRO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.convert.deepspeed.client_state import take_client
from holdfast.ckpt.convert.deepspeed.directory import LATEST, rank_files, tag_of
from holdfast.ckpt.convert.deepspeed.engine_state import MODEL, EngineState
from holdfast.ckpt.convert.deepspeed.flat_groups import FlatGroups, ranks_that_saved
from holdfast.ckpt.convert.deepspeed.mapped import MappedTensor
from holdfast.ckpt.convert.deepspeed.pickles import PickledState
from holdfast.ckpt.errors import CorruptError, NotFoundError, StateError
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.types import Json


class NamedTensors(Closing):
    """Tensors and values by name, which no two share; the base of DeepSpeed's sources."""

    parallel = True

    def __init__(self, origin: str, *, step: int) -> None:
        self.origin, self.step = origin, step
        self._tensors: dict[str, MappedTensor] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.aliases: dict[str, str] = {}
        self.values: dict[str, Json] = {}

    def add(self, tensors: Iterable[MappedTensor]) -> None:
        """Add tensors. Raises ``StateError`` for a name that is taken."""
        for tensor in tensors:
            self._claim(tensor.spec.fqn)
            self._tensors[tensor.spec.fqn] = tensor
            self.specs[tensor.spec.fqn] = tensor.spec

    def add_values(self, values: Mapping[str, Json]) -> None:
        """Add values. Raises ``StateError`` for a name that is taken."""
        for name, value in values.items():
            self._claim(name)
            self.values[name] = value

    def add_engine(self, engine: EngineState) -> None:
        """Add untrained tensors, tied names, counters and client state of an engine."""
        self.add(engine.tensors())
        for alias, stored in engine.aliases.items():
            self._claim(f"{MODEL}.{alias}")
            if f"{MODEL}.{stored}" not in self._tensors:
                raise CorruptError(
                    f"{self.origin}: {alias} is tied to {stored}, which is not stored; restore "
                    "the files from a copy"
                )
            self.aliases[f"{MODEL}.{alias}"] = f"{MODEL}.{stored}"
        self.add_values(engine.values())
        for name, item in engine.client():
            tensors, values = take_client(name, item, engine.first)
            self.add(tensors)
            self.add_values(values)
        self.specs = dict(sorted(self.specs.items()))

    def _claim(self, name: str) -> None:
        if name in self._tensors or name in self.values or name in self.aliases:
            raise StateError(f"{self.origin}: two entries are called {name}; rename one")

    def read(self, fqn: str, box: Box) -> memoryview:
        """Return a box's elements. The files have no checksums."""
        if fqn not in self._tensors:
            raise NotFoundError(f"{self.origin}: no tensor {fqn!r}; see its specs")
        return self._tensors[fqn].read(box, origin=self.origin)

    def close(self) -> None:
        """Release the files."""
        self._tensors.clear()


class ZeroSource(NamedTensors):
    """A checkpoint of ZeRO stage 1, 2 or 3: a tag's directory, or a root with ``latest``.

    Names are those of ``holdfast.save`` with a ``model``, its ``optimizer`` and an
    ``lr_scheduler``; the engine's counters are under ``deepspeed``. Weights are the 32-bit ones
    that the optimizer keeps. Raises ``StateError`` naming a layout or a class that is refused.
    """

    def __init__(self, path: str | Path) -> None:
        tag = tag_of(path, latest=LATEST)
        files = rank_files(tag, optimizers=True)
        engine = EngineState(
            [PickledState.load(file) for file in files.models], per_rank=files.per_rank
        )
        optimizers = [PickledState.load(file) for file in files.optimizers]
        ranks = ranks_that_saved(optimizers, engine.ranks)
        for kind, count in (("optim", len(optimizers)), ("model", len(files.models))):
            if count != (ranks if kind == "optim" or files.per_rank else 1):
                raise NotFoundError(
                    f"{tag}: {ranks} ranks saved it, {count} have a file *_{kind}_states.pt; copy "
                    "the files of every node into one directory"
                )
        super().__init__(f"DeepSpeed checkpoint {tag}", step=engine.step)
        flat = FlatGroups(optimizers, engine.groups)
        if flat.by_weights != files.per_rank:
            raise CorruptError(
                f"{tag}: has the model states of another stage than stage {flat.stage}: two "
                "checkpoints lie in one directory. Remove the files of the older one"
            )
        self.add(flat.tensors())
        self.add_values(flat.values())
        self.add_engine(engine)
