"""The formats of `holdfast convert`: how each is recognised, opened and written.

A format is one entry of `FORMATS`. It opens a ``TensorSource`` or a ``TensorSink`` of
``holdfast.ckpt.convert.interchange``. Its modules are imported on first use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.ckpt.checkpoints.catalog import steps
from holdfast.ckpt.convert.box_files import split_place
from holdfast.ckpt.convert.checkpoint import Identity
from holdfast.ckpt.convert.interchange import MEMORY_BYTES, TensorSink, TensorSource
from holdfast.ckpt.convert.target_layout import TargetLayout
from holdfast.ckpt.errors import MismatchError, StoreError
from holdfast.ckpt.format.manifest import MANIFEST
from holdfast.ckpt.store.places import open_store, scheme_of
from holdfast.tools.commands.checkpoints import open_step

_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")
_RANK_FILE: Final = re.compile(r"[a-z_.]+[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """A user's options for a source: step of a checkpoint, tied name to stored name."""

    step: int | None = None
    ties: Mapping[str, str] = field(default_factory=dict)


_DCP_FILE_BYTES: Final = 256 << 20
"""Largest file of a DCP directory, which is gathered in memory; smaller if the budget is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """A user's options for a target, and the identity of the source."""

    layout: TargetLayout = field(default_factory=TargetLayout)
    file_bytes: int | None = None
    memory_bytes: int = MEMORY_BYTES
    duplicate_tied: bool = False
    named_types: bool = False
    dimensions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    identity: Identity = field(default_factory=Identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of `holdfast convert`.

    ``evidence`` describes to people how `found` recognises the format; ``suffixes`` are endings of
    a target's name; ``weights`` is true of formats whose names start inside the module, ``values``
    of formats that store plain values.
    """

    evidence: str
    found: Callable[[str], bool]
    source: Callable[[str, SourceOptions], TensorSource]
    sink: Callable[[str, TargetOptions], TensorSink]
    suffixes: tuple[str, ...] = ()
    weights: bool = False
    values: bool = True


def _names(path: str) -> list[str]:
    """Return the names in a folder; none if there is no folder."""
    if not scheme_of(path) and not Path(path).is_dir():
        return []
    return open_store(path).names("")


def _is_file(path: str) -> bool:
    if not scheme_of(path):
        return Path(path).is_file()
    store, name = split_place(path)
    return store.size(name) is not None


def _new(path: str) -> str:
    """Return ``path``. Raises ``StoreError`` if it exists already."""
    if _is_file(path) or _names(path):
        raise StoreError(
            f"{path} already exists and is not overwritten; remove it or choose another target"
        )
    return path


def _holdfast_found(path: str) -> bool:
    names = _names(path)
    return MANIFEST in names or bool(names and steps(path))


def _holdfast_source(path: str, reading: SourceOptions) -> TensorSource:
    from holdfast.ckpt.convert.checkpoint import CheckpointSource

    return CheckpointSource(open_step(path, reading.step))


def _holdfast_sink(path: str, writing: TargetOptions) -> TensorSink:
    from holdfast.ckpt.convert.checkpoint import CheckpointSink

    return CheckpointSink(path, layout=writing.layout, identity=writing.identity)


def _safetensors_found(path: str) -> bool:
    names = _names(path)
    return (_is_file(path) and path.endswith(".safetensors")) or any(
        name.endswith((".safetensors", ".safetensors.index.json")) for name in names
    )


def _safetensors_source(path: str, reading: SourceOptions) -> TensorSource:
    from holdfast.ckpt.convert.safetensors import SafetensorsSource

    return SafetensorsSource(path, ties=reading.ties)


def _safetensors_sink(path: str, writing: TargetOptions) -> TensorSink:
    from holdfast.ckpt.convert.safetensors import FILE_BYTES, SafetensorsSink

    return SafetensorsSink(
        path,
        file_bytes=writing.file_bytes or FILE_BYTES,
        duplicate_tied=writing.duplicate_tied,
        content=writing.identity.content,
    )


def _torch_found(path: str) -> bool:
    files = _torch_files(path)
    ranks = all(_RANK_FILE.fullmatch(each.stem) for each in files)
    return (path.endswith(_TORCH_SUFFIXES) and _is_file(path)) or bool(files and ranks)


def _torch_files(path: str) -> list[Path]:
    """Return the torch.save files in a folder; none elsewhere."""
    if scheme_of(path) or not Path(path).is_dir():
        return []
    return sorted(each for each in Path(path).iterdir() if each.name.endswith(_TORCH_SUFFIXES))


def _torch_source(path: str, _: SourceOptions) -> TensorSource:
    from holdfast.ckpt.convert.rank_files import RankFilesSource
    from holdfast.ckpt.convert.torch_save import TorchSaveSource

    if not scheme_of(path) and Path(path).is_dir():
        return RankFilesSource(path, dict.fromkeys(_torch_files(path), TorchSaveSource))
    return TorchSaveSource(path)


def _torch_sink(path: str, _: TargetOptions) -> TensorSink:
    from holdfast.ckpt.convert.torch_save import TorchSaveSink

    return TorchSaveSink(_new(path))


def _dcp_source(path: str, _: SourceOptions) -> TensorSource:
    from holdfast.adapters.dcp import DcpSource

    return DcpSource(path)


def _dcp_sink(path: str, writing: TargetOptions) -> TensorSink:
    from holdfast.adapters.dcp import DcpSink

    return DcpSink(_new(path), file_bytes=min(writing.memory_bytes, _DCP_FILE_BYTES))


def _zero_found(path: str) -> bool:
    from holdfast.ckpt.convert.deepspeed.directory import is_zero

    return is_zero(path)


def _zero_source(path: str, _: SourceOptions) -> TensorSource:
    from holdfast.ckpt.convert.deepspeed.zero_source import ZeroSource

    return ZeroSource(path)


def _zero_sink(path: str, _: TargetOptions) -> TensorSink:
    raise MismatchError(
        f"{path}: ds-zero is read only, because its files fit one number of ranks; write "
        "--to ds-universal, which an engine with load_universal loads on any"
    )


def _universal_found(path: str) -> bool:
    from holdfast.ckpt.convert.deepspeed.directory import is_universal

    return is_universal(path)


def _universal_source(path: str, _: SourceOptions) -> TensorSource:
    from holdfast.ckpt.convert.deepspeed.universal_source import UniversalSource

    return UniversalSource(path)


def _universal_sink(path: str, _: TargetOptions) -> TensorSink:
    from holdfast.ckpt.convert.deepspeed.universal_sink import UniversalSink

    return UniversalSink(_new(path))


def _zarr_source(path: str, _: SourceOptions) -> TensorSource:
    from holdfast.ckpt.convert.zarr_import import ZarrDirectorySource

    return ZarrDirectorySource(path)


def _zarr_sink(path: str, writing: TargetOptions) -> TensorSink:
    from holdfast.ckpt.convert.zarr_export import ZarrDirectorySink

    return ZarrDirectorySink(
        _new(path), portable=not writing.named_types, dimensions=writing.dimensions
    )


FORMATS: Final[Mapping[str, Format]] = {
    "holdfast": Format(
        evidence="a root of step-… directories, or one of them with manifest.json",
        found=_holdfast_found,
        source=_holdfast_source,
        sink=_holdfast_sink,
    ),
    "dcp": Format(
        evidence="a directory with .metadata",
        found=lambda path: ".metadata" in _names(path),
        source=_dcp_source,
        sink=_dcp_sink,
    ),
    "ds-zero": Format(
        evidence="a directory with zero_pp_rank_*_optim_states.pt, or with a file latest",
        found=_zero_found,
        source=_zero_source,
        sink=_zero_sink,
    ),
    "ds-universal": Format(
        evidence="a directory with zero/optimizer_state.pt, or with a file latest_universal",
        found=_universal_found,
        source=_universal_source,
        sink=_universal_sink,
    ),
    "safetensors": Format(
        evidence="a file *.safetensors, or a directory of such",
        found=_safetensors_found,
        source=_safetensors_source,
        sink=_safetensors_sink,
        suffixes=(".safetensors",),
        weights=True,
        values=False,
    ),
    "torch": Format(
        evidence=f"a file {', '.join('*' + suffix for suffix in _TORCH_SUFFIXES)}, or a directory "
        "of such that are named by ranks, as in tp0.pt",
        found=_torch_found,
        source=_torch_source,
        sink=_torch_sink,
        suffixes=_TORCH_SUFFIXES,
        weights=True,
    ),
    "zarr": Format(
        evidence="a directory with zarr.json",
        found=lambda path: "zarr.json" in _names(path),
        source=_zarr_source,
        sink=_zarr_sink,
        suffixes=(".zarr",),
    ),
}
"""Every format by name, in the order in which a source is tested for it."""


def source_format(path: str) -> str:
    """Return the format of the file or directory at ``path``.

    Raises ``MismatchError`` that lists the signs it looked for. An empty or missing path gets
    another message.
    """
    for name, entry in FORMATS.items():
        if entry.found(path):
            return name
    if not _is_file(path) and not _names(path):
        raise MismatchError(f"{path} does not exist or is an empty directory; check the path")
    sought = "; ".join(f"{name}: {entry.evidence}" for name, entry in FORMATS.items())
    raise MismatchError(
        f"{path}: the format is not recognised; looked for: {sought}. Name it with --from"
    )


def target_format(path: str, source: str) -> str:
    """Return the format of a target by the ending of its name; ``holdfast`` if it has none.

    Raises ``MismatchError`` if source and target would both be Holdfast checkpoints.
    """
    for name, entry in FORMATS.items():
        if path.endswith(entry.suffixes or ("\0",)):
            return name
    if source != "holdfast":
        return "holdfast"
    endings = ", ".join(s for entry in FORMATS.values() for s in entry.suffixes)
    raise MismatchError(
        f"{path}: the name does not tell the format to write (known endings: {endings}); name it "
        f"with --to: {', '.join(FORMATS)}"
    )
