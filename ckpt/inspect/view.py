"""A checkpoint opened for reading: its tensors are array views, read when sliced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.ckpt.checkpoints.assemble import Assembler, TensorChunks
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.closing import Closing
from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.geometry.slicing import Key, select
from holdfast.ckpt.state import plain
from holdfast.ckpt.types import Json

if TYPE_CHECKING:
    import torch
    import zarr


class TensorView:
    """A stored tensor: ``view[2:5, :, 0]`` reads the chunks it needs and returns a torch tensor.

    Every chunk that is read is verified. Slices may have a positive step.
    """

    def __init__(self, assembler: Assembler, parts: TensorChunks) -> None:
        self._assembler, self._parts = assembler, parts

    @property
    def fqn(self) -> str:
        """The name under which it is stored."""
        return self._parts.fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self._parts.shape

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        from holdfast.ckpt.state.torch_dtypes import BY_NAME

        return BY_NAME[self._parts.dtype.name]

    @property
    def dtype_name(self) -> str:
        """Torch's name of the element type; does not import torch."""
        return self._parts.dtype.name

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.fqn} is a scalar and has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{self.fqn}: {self.dtype_name} {list(self.shape)}>"

    def __getitem__(self, key: Key | tuple[Key, ...]) -> torch.Tensor:
        import torch

        chosen = select(key if isinstance(key, tuple) else (key,), self.shape)
        data = self._assembler.bytes(self.fqn, chosen.box)
        if not data.nbytes:
            return torch.empty(chosen.shape, dtype=self.dtype)
        whole = torch.frombuffer(data, dtype=self.dtype).view(chosen.box.shape)
        return whole[chosen.within_box].reshape(chosen.shape)


class Checkpoint(Closing):
    """One committed step: FQN to `TensorView`, and plain values; tied names lead to one tensor."""

    def __init__(self, source: StoreSource) -> None:
        self._source = source
        self._assembler = Assembler(source)
        self.manifest = source.manifest

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.manifest.step

    @property
    def path(self) -> str:
        """The step's directory."""
        return self._source.store.where(self._source.folder)

    @property
    def values(self) -> Mapping[str, Any]:
        """Plain values by dotted path; tensors inside the tree of an object appear by reference."""
        return {
            name: plain.decode(value, leaf=_reference)
            for name, value in self.manifest.values.items()
        }

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied names and the stored names of their tensors."""
        return self.manifest.aliases

    def __getitem__(self, fqn: str) -> TensorView:
        stored = self.aliases.get(fqn, fqn)
        if stored not in self._assembler.tensors:
            last = str(fqn).rpartition(".")[2]
            near = [key for key in self.keys() if key.endswith(last)][:5]
            raise NotFoundError(
                f"{self.path}: no tensor {fqn!r}; "
                + (f"similar: {', '.join(near)}" if near else "see .keys() for those it holds")
            )
        return TensorView(self._assembler, self._assembler.tensors[stored])

    def keys(self) -> list[str]:
        """Return every name of a tensor, tied names included."""
        return list(self)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._assembler.tensors or fqn in self.aliases

    def __iter__(self) -> Iterator[str]:
        yield from self._assembler.tensors
        yield from self.aliases

    def __len__(self) -> int:
        return len(self._assembler.tensors) + len(self.aliases)

    def __repr__(self) -> str:
        return f"<checkpoint {self.path}: {len(self)} tensors>"

    def zarr(self, *, portable: bool = False) -> zarr.Group:
        """Return the checkpoint as a read-only Zarr v3 group.

        bfloat16 and float8 are arrays of ``ml_dtypes``; with ``portable``, of unsigned integers.
        """
        from holdfast.ckpt.zarr.view import group

        return group(self._source, portable=portable)

    def close(self) -> None:
        """Close its files."""
        self._source.close()


def _reference(tag: str, payload: Json) -> Json:
    return {tag: payload}
