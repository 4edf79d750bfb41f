"""Helpers of the commands that read checkpoints: open a step, declare arguments, match names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Final

from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import ArgumentError, NotFoundError
from holdfast.ckpt.format import codecs
from holdfast.ckpt.format.manifest import Manifest
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.store.places import locate
from holdfast.elastic.errors import ConfigError
from holdfast.tools.subcommand import positive
from holdfast.tools.terminal import parse_bytes, place, step_number

DEFAULT_MEMORY: Final = 512 << 20
MOST_THREADS: Final = 8


def pointed_at(path: str, step: int | None) -> tuple[str, int | None]:
    """Return the root, and the step that ``path`` or ``step`` names, if any.

    Raises ``ConfigError`` if they name two different steps.
    """
    root, named = locate(path)
    if named is not None and step not in (None, named):
        raise ConfigError(
            f"{path} is step {named}, but step {step} was requested; give the root {root}, or "
            "leave the step out"
        )
    return root, named if step is None else step


def open_step(path: str, step: int | None) -> StoreSource:
    """Open the step that ``path`` or ``step`` names, or the newest verified step of the root."""
    root, named = pointed_at(path, step)
    return StoreSource.chosen(root, named)


def add_path(parser: argparse.ArgumentParser, name: str = "path", metavar: str = "PATH") -> None:
    """Declare the argument for the checkpoint to read."""
    parser.add_argument(
        name, type=place, metavar=metavar, help="the root of checkpoints, or one step of it"
    )


def add_step(parser: argparse.ArgumentParser, *, default: str = "the newest verified") -> None:
    """Declare ``--step``."""
    parser.add_argument(
        "--step", type=step_number, metavar="STEP", help=f"the step to read (default: {default})"
    )


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
    """Declare ``--compress``."""
    parser.add_argument(
        "--compress",
        action="append",
        type=_codec,
        metavar="GLOB=CODEC",
        help="compress tensors whose names match, as in '*=zstd:3' or '*.exp_avg=blosc-lz4'; the "
        "first match counts; '*=none' compresses nothing (default: as in the source)",
    )


def compression_of(
    given: Sequence[tuple[str, str]] | None, names: Iterable[str], *, origin: str
) -> dict[str, str] | None:
    """Return the rules of ``--compress``, None if there are none.

    Raises ``NotFoundError`` if a rule matches no tensor.
    """
    if given is None:
        return None
    known = list(names)
    for glob, _ in given:
        require(chosen(known, [glob]), [glob], origin=origin)
    return dict(given)


def _codec(text: str) -> tuple[str, str]:
    glob, _, spelling = text.rpartition("=")
    try:
        codecs.parse(spelling, itemsize=1)
    except ArgumentError as error:
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
        help="use only names that match, as in 'model.*.weight'; repeatable",
    )


def chosen(names: Iterable[str], globs: Sequence[str] | None) -> list[str]:
    """Return the names that match one of ``globs``; all names if no globs are given."""
    if not globs:
        return list(names)
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]


def require(found: Sequence[str], globs: Sequence[str] | None, *, origin: str) -> None:
    """Raise ``NotFoundError`` if globs were given and nothing matches."""
    if globs and not found:
        raise NotFoundError(
            f"{origin}: no name matches {' or '.join(map(repr, globs))}; "
            "`holdfast inspect PATH --tree` lists the names, quote the pattern for the shell"
        )


def tensor_bytes(manifest: Manifest, fqn: str) -> int:
    """Return the size of a tensor's elements."""
    tensor = manifest.tensors[fqn]
    return prod(tensor.shape) * dtype_of(tensor.dtype, origin=fqn).itemsize
