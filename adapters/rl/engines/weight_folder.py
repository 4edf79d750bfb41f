"""A folder of weights for servers that read them by themselves, as sealed checkpoints."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.ckpt.checkpoints.retention import remove_steps
from holdfast.ckpt.convert.checkpoint import CheckpointSink
from holdfast.ckpt.convert.interchange import transfer
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError

_KEPT: Final = 2


class WeightFolder:
    """A folder of its own below ``root``, with the newest two versions that were put into it.

    vLLM servers see ``root`` as ``checkpoints`` of their ``--additional-config``. One process puts
    weights, whole tensors by the names that the servers know; no other rank takes part.
    """

    def __init__(self, root: str | Path) -> None:
        self.name = f"weights-{uuid.uuid4().hex[:12]}"
        self._root, self._lock, self._steps = Path(root) / self.name, threading.Lock(), 0
        self._last: tuple[Mapping[str, Tensor], int] | None = None

    def put(self, weights: Mapping[str, Tensor], *, version: int) -> dict[str, Any]:
        """Write the weights, the same ones only once; return their place as servers are told it.

        Raises ``ConfigError`` for parts of tensors, and ``StoreError`` if the folder refuses them.
        """
        with self._lock:
            if self._last is None or self._last[0] is not weights or self._last[1] != version:
                self._write(weights, step=self._steps + 1)
                self._steps, self._last = self._steps + 1, (weights, version)
            return {"folder": self.name, "step": self._steps}

    def remove(self) -> None:
        """Remove all versions; servers cannot load them again."""
        with self._lock:
            self._last = None
            remove_steps(open_store(self._root), range(max(1, self._steps - 1), self._steps + 1))

    def _write(self, weights: Mapping[str, Tensor], *, step: int) -> None:
        source = _Tensors(weights)
        with closing(CheckpointSink(self._root)) as sink:
            transfer(source, sink, step=step)
        if step > _KEPT:
            remove_steps(open_store(self._root), [step - _KEPT])


class _Tensors:
    """Tensors of this process as a ``TensorSource``."""

    origin = "weights of a policy"
    parallel = False

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in weights.items():
            if not isinstance(tensor, Tensor) or hasattr(tensor, "full_tensor"):
                raise ConfigError(
                    f"load: {name} is a {type(tensor).__name__}: give whole tensors, those of "
                    "full_tensor() where they are sharded"
                )
        self._tensors = dict(weights)
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(
                fqn=name, dtype=torch_dtypes.NAME_OF[each.dtype], shape=tuple(each.shape)
            )
            for name, each in weights.items()
        }
        self.aliases: Mapping[str, str] = {}
        self.values: Mapping[str, Json] = {}

    def read(self, fqn: str, box: Box) -> memoryview:
        """Return the box's elements."""
        part = self._tensors[fqn].detach()[box.slices].cpu().contiguous()
        data: memoryview = torch_dtypes.as_carrier(part).reshape(-1).view(torch.uint8).numpy().data
        return data

    def close(self) -> None:
        """Let the tensors go."""
        self._tensors.clear()
