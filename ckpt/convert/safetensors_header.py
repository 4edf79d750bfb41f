"""The head of a safetensors file: what lies where. It does not trust what it parses.

A file is 8 bytes (little-endian length of the header), the header (JSON, padded with spaces), and
the tensors' elements (C order, little-endian) back to back. Offsets count from behind the header.
See https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from holdfast.ckpt.convert.interchange import itemsize_of, nbytes_of
from holdfast.ckpt.errors import CorruptError, MismatchError
from holdfast.ckpt.geometry.layout import TensorSpec
from holdfast.ckpt.types import learn

LENGTH_BYTES: Final = 8
HEADER_MOST: Final = 100_000_000
"""The format's own limit on the header's length in bytes."""

_ALIGN: Final = 8
_METADATA: Final = "__metadata__"
_FLOAT4: Final = "float4_e2m1fn_x2"

TORCH_OF: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F4": _FLOAT4,
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
}
"""Element types of the format and torch's names for them (torch has no 6-bit floats)."""

NAME_OF: Final[Mapping[str, str]] = {torch: name for name, torch in TORCH_OF.items()}


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """A file's tensors, the start of each in the file, and its string metadata."""

    specs: Mapping[str, TensorSpec]
    starts: Mapping[str, int]
    metadata: Mapping[str, str]


def header_length(head: bytes, *, file_bytes: int, origin: str) -> int:
    """Return the length of the header from the first 8 bytes. Raises ``CorruptError``."""
    length = int.from_bytes(head, "little")
    if len(head) < LENGTH_BYTES or not 2 <= length <= HEADER_MOST:
        raise CorruptError(
            f"{origin}: not a safetensors file: its first {len(head)} bytes announce a header of "
            f"{length} bytes; give another file"
        )
    if LENGTH_BYTES + length > file_bytes:
        raise CorruptError(
            f"{origin}: a header of {length} bytes is announced, the file has {file_bytes}: it was "
            "cut off; fetch it again"
        )
    return length


def parse_header(raw: bytes, *, file_bytes: int, origin: str) -> SafetensorsHeader:
    """Parse the header ``raw`` of a file of ``file_bytes``.

    Raises ``CorruptError`` unless the tensors fill the file exactly, without gap or overlap.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(fields.pop(_METADATA, b"{}"), type=dict[str, str])
        entries = {
            name: msgspec.json.decode(field, type=_Entry, strict=True)
            for name, field in fields.items()
        }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{origin}: not a safetensors header: {error}") from error
    base, specs, starts = LENGTH_BYTES + len(raw), {}, {}
    for name, entry in entries.items():
        specs[name] = _spec(name, entry, origin=origin)
        starts[name] = base + entry.data_offsets[0]
    _check_extents(entries, data_bytes=file_bytes - base, origin=origin)
    return SafetensorsHeader(specs=specs, starts=starts, metadata=metadata)


def _spec(name: str, entry: _Entry, *, origin: str) -> TensorSpec:
    dtype, shape = TORCH_OF.get(entry.dtype), entry.shape
    if dtype is None:
        raise MismatchError(
            f"{origin}: tensor {name}: element type {entry.dtype} has no counterpart in torch; "
            f"known are {', '.join(TORCH_OF)}"
        )
    if dtype == _FLOAT4:  # the file counts halves of bytes, torch counts bytes
        if not shape or shape[-1] % 2:
            raise CorruptError(f"{origin}: tensor {name}: shape {list(shape)} of 4-bit elements")
        shape = (*shape[:-1], shape[-1] // 2)
    spec = TensorSpec(fqn=name, dtype=dtype, shape=shape)
    start, end = entry.data_offsets
    if end - start != (needed := nbytes_of(spec)):
        raise CorruptError(
            f"{origin}: tensor {name}: {dtype} {list(shape)} has {needed} bytes, the header gives "
            f"it {start} … {end}; fetch the file again"
        )
    return spec


def _check_extents(entries: Mapping[str, _Entry], *, data_bytes: int, origin: str) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.data_offsets[0] != end:
            kind = "overlaps the one before" if entry.data_offsets[0] < end else "leaves a gap"
            raise CorruptError(
                f"{origin}: tensor {name} starts at {entry.data_offsets[0]} and {kind}, which "
                f"ends at {end}; fetch the file again"
            )
        end = entry.data_offsets[1]
    if end != data_bytes:
        raise CorruptError(
            f"{origin}: the header describes {end} bytes of tensors, the file has {data_bytes}; "
            "fetch it again"
        )


def build_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return length and header of a file that holds ``specs`` in this order.

    Raises ``MismatchError`` for an element type that the format does not have.
    """
    fields: dict[str, object] = {_METADATA: dict(metadata)}
    at = 0
    for spec in specs:
        shape, end = list(spec.shape), at + nbytes_of(spec)
        if spec.fqn == _METADATA:
            raise MismatchError(
                f"safetensors: no tensor can be called {_METADATA}; select others, or write "
                "another format"
            )
        if spec.dtype not in NAME_OF or (spec.dtype == _FLOAT4 and not shape):
            raise MismatchError(
                f"safetensors has no {spec.dtype} of shape {shape} ({spec.fqn}); select other "
                "tensors"
            )
        if spec.dtype == _FLOAT4:
            shape[-1] *= 2
        fields[spec.fqn] = {
            "dtype": NAME_OF[spec.dtype],
            "shape": shape,
            "data_offsets": [at, end],
        }
        at = end
    body = msgspec.json.encode(fields)
    body += b" " * (-len(body) % _ALIGN)
    if len(body) > HEADER_MOST:
        raise MismatchError(f"a header of {len(body)} bytes is too long; write smaller files")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def by_alignment(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return ``specs`` with wide elements first, so that each starts at a multiple of its width."""
    return sorted(specs, key=itemsize_of, reverse=True)


learn(globals())
