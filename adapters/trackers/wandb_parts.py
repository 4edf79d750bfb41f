"""The steps in the files that wandb writes offline.

A part of a run is a file of records in LevelDB's log format, behind a header of seven bytes; a
record is a protocol buffer of the package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from holdfast.adapters.trackers.needed import needed

_BLOCK: Final = 32768
_HEADER: Final = 7  # of the file, and of each piece of a record: checksum, length, kind
_WHOLE, _LAST = 1, 4


def steps_in(directory: Path, run: str) -> Iterator[int]:
    """Yield the steps in all parts of a run below ``directory``."""
    proto = needed("wandb.proto.wandb_internal_pb2", tracker="WandB", extra="wandb")
    for part in directory.glob(f"wandb/offline-run-*-{run}/run-{run}.wandb"):
        for data in records(part.read_bytes()):
            record = proto.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                for item in record.history.item:
                    if "_step" in (item.key, *item.nested_key):
                        yield msgspec.json.decode(item.value_json, type=int)


def records(data: bytes) -> Iterator[bytes]:
    """Yield the whole records of a file. The rest of one that was being written is left out."""
    at, pieces = _HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # the end of a block, too short for a piece
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if not kind or at + _HEADER + length > len(data):
            return
        pieces += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_WHOLE, _LAST):
            yield pieces
            pieces = b""
