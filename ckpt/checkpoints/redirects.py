"""Roots of checkpoints that stand for others in this process.

`holdfast check` makes runs of a script that must leave the script's own checkpoints alone. The
loops of such a run write to other roots, and a script that loads the checkpoint of one of its loops
must find it there.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.store.places import path_of, scheme_of

_instead: dict[str, str] = {}


def redirect(root: str | Path, *, to: str) -> None:
    """Let ``to`` stand for ``root`` from now on: for all writes, and for reads of what is there."""
    _instead[_key(root)] = to


def to_write(root: str | Path) -> str | Path:
    """Return the root to write to in place of ``root``: that itself, unless another stands for it.

    ``root`` is a path or URL as the user gave it; so in `to_read`.
    """
    return _instead.get(_key(root), root) if _instead else root


def to_read(root: str | Path, step: int | None) -> str | Path:
    """Return the root that has ``step`` (None: any) of ``root``.

    It is ``root`` itself, unless the step was written to the root that stands for it.
    """
    other = to_write(root)
    if other == root:
        return root
    there = committed_steps(other)
    return other if there and step in (None, *there) else root


def _key(root: str | Path) -> str:
    """Return the same text for all spellings of a root."""
    match scheme_of(root):
        case "":
            return os.path.realpath(root)
        case "file":
            return os.path.realpath(path_of(str(root)))
    return str(root).rstrip("/")
