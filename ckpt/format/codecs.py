"""Compression of a tensor's chunks: codecs of Zarr v3, implemented by numcodecs.

The default is no compression: weights hardly compress, and raw bytes can be read by ranges.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, TypeAlias

import msgspec
from typing_extensions import Buffer

from holdfast.ckpt.checks import shown
from holdfast.ckpt.errors import ArgumentError, CorruptError, StateError
from holdfast.ckpt.types import Json, learn

Rules: TypeAlias = Mapping[str, str]
"""Glob pattern of names -> codec, spelled for `parse`. The first pattern that matches counts."""

_BLOSC: Final = ("lz4", "lz4hc", "blosclz", "zstd", "zlib")
_SPELLING: Final = re.compile(r"(?P<name>[a-z0-9-]+)(?::(?P<level>\d+))?")
_HELP: Final = "use none, zstd[:1-22], or blosc-CODEC[:0-9] with CODEC one of " + ", ".join(_BLOSC)
_MOST_BYTES: Final = (1 << 31) - 1024
_ZSTD_LEVEL: Final = 3
_BLOSC_LEVEL: Final = 5


MAX_RATIO: Final = 1 << 15
"""The largest ratio of any codec here: zstd stores blocks of 128 KiB in 4 bytes at best."""


class Codec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A compressor with its settings, as a manifest names it.

    ``name`` is ``zstd`` or ``blosc``; ``cname`` is blosc's inner codec. blosc shuffles the bytes of
    elements (of ``typesize`` bytes), so that exponents lie beside exponents.
    """

    name: Literal["zstd", "blosc"]
    level: int
    cname: str = ""
    typesize: int = 0

    def __post_init__(self) -> None:
        if self.name == "zstd" and not 1 <= self.level <= 22:
            raise ValueError(f"zstd level {self.level} is not one of 1 … 22")
        if self.name == "blosc" and not 0 <= self.level <= 9:
            raise ValueError(f"blosc level {self.level} is not one of 0 … 9")
        if self.name == "blosc" and self.cname not in _BLOSC:
            raise ValueError(f"blosc has no codec {self.cname!r}")
        if self.name == "blosc" and not 1 <= self.typesize <= 255:
            raise ValueError(f"blosc type size {self.typesize} is not one of 1 … 255")

    def __str__(self) -> str:
        name = f"blosc-{self.cname}" if self.name == "blosc" else self.name
        return f"{name}:{self.level}"

    def zarr(self) -> Json:
        """Return the codec in the spelling of Zarr v3 metadata."""
        if self.name == "zstd":
            return {"name": "zstd", "configuration": {"level": self.level, "checksum": False}}
        return {
            "name": "blosc",
            "configuration": {
                "cname": self.cname,
                "clevel": self.level,
                "shuffle": "shuffle" if self.typesize > 1 else "noshuffle",
                "typesize": self.typesize,
                "blocksize": 0,
            },
        }


def parse(spelling: str, *, itemsize: int) -> Codec | None:
    """Return the codec for ``zstd``, ``zstd:9``, ``blosc-lz4``, …; None for ``none``.

    Raises ``ArgumentError`` listing the known codecs.
    """
    match = _SPELLING.fullmatch(spelling)
    if spelling == "none":
        return None
    try:
        if match and match["name"] == "zstd":
            return Codec(name="zstd", level=int(match["level"] or _ZSTD_LEVEL))
        if match and match["name"].startswith("blosc-"):
            return Codec(
                name="blosc",
                cname=match["name"].removeprefix("blosc-"),
                level=int(match["level"] or _BLOSC_LEVEL),
                typesize=itemsize,
            )
    except ValueError as error:
        raise ArgumentError(f"compression {spelling!r}: {error}; {_HELP}") from error
    raise ArgumentError(f"compression {spelling!r} is not known; {_HELP}")


def choose(rules: Rules, fqn: str, *, itemsize: int) -> Codec | None:
    """Return the codec that ``rules`` give a tensor: by its exact name first, then by pattern."""
    if fqn in rules:
        return parse(rules[fqn], itemsize=itemsize)
    for pattern, spelling in rules.items():
        if fnmatchcase(fqn, pattern):
            return parse(spelling, itemsize=itemsize)
    return None


def check(rules: Rules) -> None:
    """Raise ``ArgumentError`` if a rule is no pattern, or names an unknown codec."""
    if not isinstance(rules, Mapping):
        found = shown(rules)
        raise ArgumentError(f"compression is {found}; give patterns, such as {{'*': 'zstd'}}")
    for pattern, spelling in rules.items():
        if not isinstance(pattern, str) or not isinstance(spelling, str):
            raise ArgumentError(
                f"compression has {pattern!r}: {spelling!r}; give texts, such as {{'*': 'zstd'}}"
            )
        parse(spelling, itemsize=1)


@functools.cache
def _implementation(codec: Codec) -> Any:
    import numcodecs

    if codec.name == "zstd":
        return numcodecs.Zstd(level=codec.level)
    shuffle = numcodecs.Blosc.SHUFFLE if codec.typesize > 1 else numcodecs.Blosc.NOSHUFFLE
    return numcodecs.Blosc(
        cname=codec.cname, clevel=codec.level, shuffle=shuffle, typesize=codec.typesize
    )


def encode(codec: Codec, data: Buffer) -> bytes:
    """Return ``data`` compressed. Raises ``StateError`` for more bytes than the codec accepts."""
    if (nbytes := memoryview(data).nbytes) > _MOST_BYTES:
        raise StateError(
            f"a chunk of {nbytes} bytes cannot be compressed by {codec}, which takes {_MOST_BYTES} "
            "at most; save that tensor with compression none"
        )
    return bytes(_implementation(codec).encode(data))


def decode(
    codec: Codec, data: Buffer, *, nbytes: int, into: memoryview | None = None
) -> memoryview:
    """Return the ``nbytes`` decompressed bytes of ``data``, in ``into`` if it is given.

    Raises ``CorruptError`` if ``data`` cannot be that many bytes, before memory is allocated.
    """
    view = memoryview(data).cast("B")
    if (claimed := _claimed_bytes(codec, view)) != nbytes:
        raise CorruptError(f"the compressed data declares {claimed} bytes, not {nbytes}")
    if nbytes > view.nbytes * MAX_RATIO:
        raise CorruptError(f"{view.nbytes} bytes cannot be the compressed form of {nbytes} bytes")
    into = memoryview(bytearray(nbytes)) if into is None else into
    try:
        _implementation(codec).decode(view, out=into)
    except (RuntimeError, ValueError) as error:
        raise CorruptError(f"compressed data cannot be read: {error}") from error
    return into


_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_FIELD_BYTES: Final = (0, 2, 4, 8)
_DICTIONARY_BYTES: Final = (0, 1, 2, 4)


def _claimed_bytes(codec: Codec, data: memoryview) -> int | None:
    """Return the decompressed size in a frame's header (RFC 8878 3.1.1.1, or blosc's)."""
    if codec.name == "blosc":
        return int.from_bytes(data[4:8], "little") if data.nbytes >= 16 else None
    if data.nbytes < 6 or bytes(data[:4]) != _ZSTD_MAGIC:
        return None
    descriptor = data[4]
    single = descriptor >> 5 & 1
    size = _FIELD_BYTES[descriptor >> 6] or single
    at = 5 + (1 - single) + _DICTIONARY_BYTES[descriptor & 3]
    value = int.from_bytes(data[at : at + size], "little")
    return value + 256 if size == 2 else value if size else None


def spellings(codecs: Sequence[Codec | None]) -> str:
    """Return the different codecs in words."""
    return ", ".join(sorted({str(codec) if codec else "none" for codec in codecs}))


learn(globals())
