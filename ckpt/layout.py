"""Where every piece of every tensor lies: boxes and layouts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import msgspec


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A half-open n-D region of a tensor's global index space; 0-D for scalars.

    An empty box (some extent 0) is legal: uneven shards leave ranks without data.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"box offset {self.offset} and shape {self.shape} differ in rank")
        if any(o < 0 for o in self.offset):
            raise ValueError(f"box offset {self.offset} has a negative extent")
        if any(s < 0 for s in self.shape):
            raise ValueError(f"box shape {self.shape} has a negative extent")

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, or None where there is none."""
        lo = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        hi = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(h - o for o, h in zip(lo, hi, strict=True))
        return None if any(n <= 0 for n in shape) else Box(offset=lo, shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a tensor is, whoever holds it: name, dtype (torch's name, ``"bfloat16"``), shape."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which rank holds which boxes of which tensor.

    ``specs`` maps FQN to spec; ``boxes`` maps FQN to one tuple of boxes per rank (replicas show
    as equal boxes at several ranks; a rank without a part has an empty tuple).
    """

    specs: Mapping[str, TensorSpec]
    boxes: Mapping[str, tuple[tuple[Box, ...], ...]]
