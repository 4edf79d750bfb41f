"""Translation between stored names and those of torch.distributed.checkpoint.

DCP flattens a nested state dict into names, ``".".join(path)``, and remembers the path of each,
because keys can contain dots. A checkpoint written through DCP keeps its names; paths that do not
follow from the names are stored in values called ``dcp.paths.<writer>``. In any other Holdfast
checkpoint the optimizer's names are those of ``ckpt.save``, and become DCP's here::

    optimizer.state.model.layers.0.weight.exp_avg  →  optimizer.state.layers.0.weight.exp_avg
    optimizer.groups.0.lr                          →  optimizer.param_groups.0.lr
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from holdfast.ckpt.state import plain
from holdfast.ckpt.types import Json

Path: TypeAlias = tuple[str | int, ...]
"""Place of an entry in the nested state dict: keys of mappings, indices of lists."""

PATHS: Final = "dcp.paths."
"""Prefix of the values, one per writer, that map names to paths; they mark checkpoints of DCP."""

_GROUP: Final = re.compile(r"(.+)\.groups\.(\d+)\.params")


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpView:
    """A checkpoint in DCP's names.

    ``tensors`` maps DCP names to ``stored`` names, ``values`` to objects, ``paths`` to their places
    in the nested state dict.
    """

    stored: frozenset[str]
    tensors: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _TensorAt:
    """Stands for a tensor inside the tree of an object that ``ckpt.save`` has saved."""

    stored: str


class _OfOneRank:
    """Stands for a value that belongs to one rank; DCP cannot represent those."""


def name_of(path: Path) -> str:
    """Return DCP's name of the entry at ``path``."""
    return ".".join(map(str, path))


def usual_path(name: str) -> Path:
    """Return the default path, for a name without a recorded one: its first part, then the rest.

    So ``model.layers.0.weight`` is ``layers.0.weight`` of the state dict called ``model``.
    """
    return tuple(name.split(".", 1))


def is_leaf(value: object) -> bool:
    """Say whether DCP keeps ``value`` as one entry when it flattens.

    DCP takes mappings apart, and lists that hold mappings or tensors, but never tuples.
    """
    if isinstance(value, Mapping | _TensorAt):
        return False
    return not isinstance(value, list) or all(map(is_leaf, value))


def leaves(path: Path, value: object) -> Iterator[tuple[Path, Any]]:
    """Yield the entries into which DCP flattens ``value``, with their paths."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves((*path, str(key)), item)
    elif isinstance(value, list) and not is_leaf(value):
        for i, item in enumerate(value):
            yield from leaves((*path, i), item)
    else:
        yield path, value


def to_record(paths: Mapping[str, Path], values: Mapping[str, object]) -> dict[str, Json]:
    """Return the part of ``paths`` that must be recorded so that `view_of` finds all of them again.

    ``values`` are the objects among the entries: one that would be flattened, but was not, needs
    its path recorded too.
    """
    return {
        name: list(path)
        for name, path in paths.items()
        if path != usual_path(name) or not is_leaf(values.get(name))
    }


def view_of(
    tensors: Iterable[str], *, aliases: Mapping[str, str], values: Mapping[str, Json]
) -> DcpView:
    """Return DCP's view of stored tensors, tied names and plain values (as JSON)."""
    recorded: dict[str, Path] = {}
    for name, paths in values.items():
        if name.startswith(PATHS):
            recorded |= {fqn: tuple(path) for fqn, path in paths.items()}
    ours = not any(name.startswith(PATHS) for name in values)
    path_of = _optimizer_paths(values) if ours else usual_path
    stored = tuple(tensors)
    view = DcpView(stored=frozenset(stored))
    for name in (*stored, *aliases):
        path = recorded.get(name) or path_of(name)
        view.tensors[name_of(path)] = aliases.get(name, name)
        view.paths[name_of(path)] = path
    for name, value in values.items():
        if name.startswith(PATHS):
            continue
        found = plain.decode(value, leaf=_reference)
        if ours and _GROUP.fullmatch(name):
            found = [_bare(member) for member in found]
        if name in recorded:
            view.values[name] = found
            view.paths[name] = recorded[name]
        else:
            _add(view, path_of(name), found, aliases=aliases)
    return view


def _add(view: DcpView, start: Path, value: object, *, aliases: Mapping[str, str]) -> None:
    """Add a value; leave out tensors in it that are not stored (they were not selected)."""
    for path, leaf in leaves(start, value):
        name = name_of(path)
        if isinstance(leaf, _TensorAt):
            stored = aliases.get(leaf.stored, leaf.stored)
            if stored not in view.stored:
                continue
            view.tensors[name] = stored
        elif not isinstance(leaf, _OfOneRank):
            view.values[name] = leaf
        else:
            continue
        view.paths[name] = path


def _reference(tag: str, payload: Any) -> object:
    if tag in ("$tensor", "$array"):
        return _TensorAt(payload)
    if tag == "$rank":
        return _OfOneRank()
    return plain.no_tags(tag, payload)


def _bare(parameter: str) -> str:
    """Return a parameter's name in its own module: without the first part, the module's name."""
    return parameter.partition(".")[2] or parameter


def _optimizer_paths(values: Mapping[str, Json]) -> Callable[[str], Path]:
    """Return the function from names to paths, for optimizer entries named by ``ckpt.save``."""
    optimizers: dict[str, set[str]] = {}
    for name, members in values.items():
        if match := _GROUP.fullmatch(name):
            optimizers.setdefault(match[1], set()).update(members)

    def path_of(name: str) -> Path:
        for optimizer, parameters in optimizers.items():
            start = optimizer.split(".")
            if name.startswith(f"{optimizer}.groups."):
                number, _, key = name.removeprefix(f"{optimizer}.groups.").partition(".")
                return (*start, "param_groups", int(number), key)
            if name.startswith(f"{optimizer}.state."):
                parameter, _, key = name.removeprefix(f"{optimizer}.state.").rpartition(".")
                if parameter in parameters:
                    return (*start, "state", _bare(parameter), key)
        return usual_path(name)

    return path_of
