"""A source under other names: with a prefix added or removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.convert.interchange import TensorSource, choose
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.types import Json

Rename: TypeAlias = Callable[[str], str | None]
"""Returns the new name of a tensor or value, or None to leave it out."""


class Renamed(Closing):
    """Shows another source's tensors and values under the names that ``rename`` gives them.

    If the stored one of tied names is left out, the next one takes its place. Raises
    ``MismatchError`` if two would have the same name.
    """

    def __init__(self, source: TensorSource, rename: Rename) -> None:
        self._source, self.origin = source, source.origin
        self.parallel = bool(getattr(source, "parallel", False))
        self._stored: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        new: dict[str, str] = {}
        for name, at in [*((fqn, fqn) for fqn in source.specs), *source.aliases.items()]:
            if (renamed := rename(name)) is None:
                continue
            if renamed in self._stored or renamed in self.aliases or not renamed:
                raise MismatchError(f"{self.origin}: {name}: the name {renamed!r} is taken")
            if at in new:
                self.aliases[renamed] = new[at]
            else:
                new[at], self._stored[renamed] = renamed, at
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(fqn=name, dtype=source.specs[at].dtype, shape=source.specs[at].shape)
            for name, at in self._stored.items()
        }
        self.values: Mapping[str, Json] = {
            renamed: _renamed(value, new)
            for name, value in source.values.items()
            if (renamed := rename(name)) is not None
        }

    def read(self, fqn: str, box: Box) -> memoryview:
        """Return a box's elements."""
        return self._source.read(self._stored[fqn], box)

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def _renamed(value: Json, names: Mapping[str, str]) -> Json:
    """Return a value with the references to tensors in it renamed."""
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    for tag in ("$tensor", "$array"):
        if value.keys() == {tag}:
            return {tag: names.get(value[tag], value[tag])}
    return {key: _renamed(item, names) for key, item in value.items()}


def with_prefix(source: TensorSource, prefix: str) -> Renamed:
    """Return ``source`` with ``prefix`` before every name."""
    return Renamed(source, lambda name: prefix + name)


def without_prefix(source: TensorSource, prefix: str) -> Renamed:
    """Return the tensors and values under ``prefix``, without it.

    Raises ``MismatchError`` if no tensor starts with it.
    """
    if not any(name.startswith(prefix) for name in (*source.specs, *source.aliases)):
        raise MismatchError(
            f"{source.origin}: no tensor's name starts with {prefix!r}; it has "
            f"{', '.join(list(source.specs)[:6]) or 'none'}"
        )
    return Renamed(source, lambda name: name[len(prefix) :] if name.startswith(prefix) else None)


def selected(source: TensorSource, globs: Sequence[str]) -> Renamed:
    """Return the selection of the globs. Raises ``MismatchError`` if it has no tensor."""
    chosen = choose(source, globs)
    kept = chosen.specs.keys() | chosen.aliases.keys() | chosen.values.keys()
    return Renamed(source, lambda name: name if name in kept else None)


def module_names(source: TensorSource) -> list[str]:
    """Return the top-level names that hold tensors and are not optimizers."""
    optimizers = {name.partition(".groups.")[0] for name in source.values if ".groups." in name}
    names = dict.fromkeys(fqn.partition(".")[0] for fqn in source.specs)
    return [name for name in names if name not in optimizers]


def the_module(source: TensorSource) -> str:
    """Return the only module's name. Raises ``MismatchError`` naming the modules otherwise."""
    names = module_names(source)
    if len(names) != 1:
        raise MismatchError(
            f"{source.origin}: holds the tensors of {', '.join(names) or 'no module'}; choose "
            "one of them with --name"
        )
    return names[0]
