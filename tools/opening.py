"""How the commands that look at checkpoints open what the user points at, and choose names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Final

from ckpt import codecs
from ckpt.catalog import choose
from ckpt.errors import NotFoundError, StateError
from ckpt.manifest import Manifest
from ckpt.source import StoreSource
from ckpt.store.places import locate
from ckpt.zarr_dtypes import dtype_of
from tools.terminal import parse_bytes, positive

DEFAULT_MEMORY: Final = 512 << 20
MOST_THREADS: Final = 8


def open_step(path: str, step: int | None) -> StoreSource:
    """Open the step that ``path`` or ``step`` names, else the newest verified one of the root."""
    root, named = locate(path)
    return StoreSource(root, choose(root, named if step is None else step))


def add_resources(parser: argparse.ArgumentParser) -> None:
    """Declare ``--memory`` and ``--threads``."""
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        default=DEFAULT_MEMORY,
        metavar="SIZE",
        help="working memory, as in 2GiB (512MiB)",
    )
    add_threads(parser)


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Declare ``--threads``."""
    parser.add_argument(
        "--threads",
        type=positive,
        default=min(MOST_THREADS, len(os.sched_getaffinity(0)) * 2),
        metavar="N",
        help="threads that read (twice the processors, at most 8)",
    )


def add_compress(parser: argparse._ActionsContainer) -> None:
    """Declare how what is written is compressed."""
    parser.add_argument(
        "--compress",
        action="append",
        type=_codec,
        metavar="GLOB=CODEC",
        help="compress tensors whose names match, as in '*=zstd:3' or '*.exp_avg=blosc-lz4'; the "
        "first match counts; '*=none' compresses nothing (default: as the source is)",
    )


def _codec(text: str) -> tuple[str, str]:
    glob, _, spelling = text.rpartition("=")
    try:
        codecs.parse(spelling, itemsize=1)
    except StateError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not glob:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form GLOB=CODEC")
    return glob, spelling


def add_select(parser: argparse.ArgumentParser) -> None:
    """Declare ``--select``."""
    parser.add_argument(
        "--select",
        action="append",
        metavar="GLOB",
        help="only names that match, as in 'model.*.weight'; may be given several times",
    )


def chosen(names: Iterable[str], globs: Sequence[str] | None) -> list[str]:
    """Return the names that match one of ``globs``; all of them where none are given."""
    if not globs:
        return list(names)
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]


def require(found: Sequence[str], globs: Sequence[str] | None, *, origin: str) -> None:
    """Raise ``NotFoundError`` where globs were given and nothing matches."""
    if globs and not found:
        raise NotFoundError(
            f"{origin}: no name matches {' or '.join(map(repr, globs))}; "
            "`holdfast inspect PATH --tree` lists the names, quote the pattern for the shell"
        )


def tensor_bytes(manifest: Manifest, fqn: str) -> int:
    """Return the size of a tensor."""
    tensor = manifest.tensors[fqn]
    return prod(tensor.shape) * dtype_of(tensor.dtype, origin=fqn).itemsize
