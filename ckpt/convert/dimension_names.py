"""Names of the dimensions of arrays, as xarray needs them to open a Zarr group.

In a group, a name stands for one length. So every dimension has a name of its own, unless the user
gives names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.layout import TensorSpec


def dimension_names(
    specs: Mapping[str, TensorSpec], given: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return the names of the dimensions of each tensor, by FQN.

    ``given`` maps globs of FQNs to names; the first match counts. The other tensors have
    ``FQN.0``, ``FQN.1``, … Raises ``MismatchError`` if the number of names is not that of the
    dimensions, if a name stands twice in a tensor or for two lengths, or if a glob matches nothing.
    """
    named: dict[str, tuple[str, ...]] = {}
    lengths: dict[str, tuple[int, str]] = {}
    unused = set(given)
    for fqn, spec in specs.items():
        pattern = next((glob for glob in given if fnmatchcase(fqn, glob)), None)
        if pattern is None:
            named[fqn] = tuple(f"{fqn}.{i}" for i in range(len(spec.shape)))
            continue
        unused.discard(pattern)
        named[fqn] = names = tuple(given[pattern])
        if len(names) != len(spec.shape):
            raise MismatchError(
                f"tensor {fqn} has {len(spec.shape)} dimensions, shape {list(spec.shape)}, and "
                f"{pattern!r} gives {len(names)} names: {', '.join(names)}; give one for each"
            )
        if len(set(names)) < len(names):
            raise MismatchError(
                f"tensor {fqn}: {pattern!r} gives the same name to two dimensions: "
                f"{', '.join(names)}; give each its own"
            )
        for name, length in zip(names, spec.shape, strict=True):
            other, first = lengths.setdefault(name, (length, fqn))
            if other != length:
                raise MismatchError(
                    f"the dimension name {name!r} stands for {other} in tensor {first} and for "
                    f"{length} in tensor {fqn}; in a group a name stands for one length: give "
                    "another one"
                )
    if unused:
        raise MismatchError(
            f"{', '.join(map(repr, sorted(unused)))} names the dimensions of no tensor; there are "
            f"{', '.join([*specs][:6]) or 'none'}"
        )
    return named
