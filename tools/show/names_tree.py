"""The names of a checkpoint as a tree with sizes; equal siblings are drawn once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final

from rich.text import Text
from rich.tree import Tree

from holdfast.ckpt.format.manifest import TensorRecord
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.types import Json
from holdfast.tools.terminal import readable, shape_text

_NUMBERED: Final = re.compile(r"\d+")


@dataclass(slots=True)
class Branch:
    """A dotted prefix: the tensors and tied names directly below it, and the longer prefixes."""

    branches: dict[str, Branch] = field(default_factory=dict)
    leaves: dict[str, TensorRecord | str] = field(default_factory=dict)
    """Last part of a name -> its tensor, or the name it is tied to."""
    tensors: int = 0
    nbytes: int = 0

    def signature(self) -> tuple[object, ...]:
        """Return a key that is equal for branches that are drawn as one."""
        leaves = tuple((name, _kind(leaf)) for name, leaf in self.leaves.items())
        below = tuple((name, branch.signature()) for name, branch in self.branches.items())
        return leaves, below

    def described(self) -> Json:
        """Return counts and sizes per subtree as JSON."""
        found: Json = {"tensors": self.tensors, "bytes": self.nbytes}
        if self.branches:
            found["below"] = {name: branch.described() for name, branch in self.branches.items()}
        return found


def _kind(leaf: TensorRecord | str) -> str:
    return "=" if isinstance(leaf, str) else f"{leaf.dtype} {leaf.shape} {leaf.codec or ''}"


def size_of(tensor: TensorRecord) -> int:
    """Return the bytes of a tensor's elements."""
    return prod(tensor.shape) * dtype_of(tensor.dtype, origin="manifest").itemsize


def grow(tensors: Mapping[str, TensorRecord], aliases: Mapping[str, str]) -> Branch:
    """Return the tree of all names."""
    root = Branch()
    named: dict[str, TensorRecord | str] = {**tensors, **aliases}
    for name, leaf in named.items():
        *path, last = name.split(".")
        nbytes = 0 if isinstance(leaf, str) else size_of(leaf)
        branch = root
        for part in ("", *path):
            branch = branch.branches.setdefault(part, Branch()) if part else branch
            branch.tensors += not isinstance(leaf, str)
            branch.nbytes += nbytes
        branch.leaves[last] = leaf
    return root


def draw(root: Branch, *, title: str) -> Tree:
    """Return the tree as an object that rich prints."""
    tree = Tree(Text.assemble((title, "bold"), _sum(root)))
    _draw(tree, root)
    return tree


def _sum(branch: Branch) -> tuple[str, str]:
    if not branch.tensors:
        return "  tied names only", "dim"
    noun = "tensor" if branch.tensors == 1 else "tensors"
    return f"  {branch.tensors} {noun}, {readable(branch.nbytes)}", "dim"


def _draw(tree: Tree, branch: Branch, *, prefix: str = "") -> None:
    for names, below in _alike(branch.branches):
        if len(names) == 1 and len(below.branches) + len(below.leaves) == 1:
            _draw(tree, below, prefix=f"{prefix}{names[0]}.")  # this branch has a single child
            continue
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        text = Text.assemble((prefix + label, "bold"), _sum(below))
        if len(names) > 1:
            text.append(f" each, {len(names)} alike", "dim")
        _draw(tree.add(text), below)
    for name, leaf in branch.leaves.items():
        if isinstance(leaf, str):
            tree.add(Text.assemble(prefix + name, (f"  = {leaf}", "dim")))
            continue
        codec = f" {leaf.codec}" if leaf.codec else ""
        kind = f"  {leaf.dtype} {shape_text(leaf.shape)}"
        size = f"  {readable(size_of(leaf))}{codec}"
        tree.add(Text.assemble(prefix + name, (kind, "cyan"), (size, "dim")))


def _alike(branches: Mapping[str, Branch]) -> list[tuple[list[str], Branch]]:
    """Return the branches; consecutive numbered ones that look alike are grouped."""
    found: list[tuple[list[str], Branch]] = []
    last: tuple[object, ...] | None = None
    for name, branch in sorted(branches.items(), key=lambda item: _order(item[0])):
        signature = branch.signature() if _NUMBERED.fullmatch(name) else None
        if signature is not None and signature == last:
            found[-1][0].append(name)
        else:
            found.append(([name], branch))
        last = signature
    return found


def _order(name: str) -> tuple[bool, int, str]:
    numbered = _NUMBERED.fullmatch(name) is not None
    return (not numbered, int(name) if numbered else 0, "" if numbered else name)
