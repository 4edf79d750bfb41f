"""What a rollout worker's log is made of: records of the tokens that were sampled since the last.

A record is ``[version u8][width u8]`` and one part per sample, one behind the other: the numbers
``ordinal, sample, start, count, runs``; for each run ``generation, policy version`` and, unless it
is the last, its tokens; then ``count`` token ids of ``width`` bytes and ``count`` log-probabilities
(float32), little-endian, without padding. Numbers are LEB128, seven bits a byte, the lowest first.
The sampling coordinate of token i of a part is (ordinal, sample, start + i).

The width is the least of 1, 2 and 4 that holds the ids of the record, so a vocabulary of any size
fits, and a small one costs no more than it must.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from adapters.rl.trajectory import Delta, SampleId, Stamp, cut_stamps, extend_stamps
from ckpt.errors import CorruptError

RECORD_VERSION: Final = 2
MAX_ID: Final = (1 << 32) - 1
_LEAD: Final = struct.Struct("<BB")
_CODES: Final = {1: "B", 2: "H", 4: "I"}
_LOGPROB_BYTES: Final = 4
_NUMBER_BITS: Final = 64


def encode_deltas(deltas: Sequence[Delta]) -> bytes:
    """Return one log record of these deltas. Raises ``ValueError`` for what it cannot hold."""
    largest = max((max(each.tokens, default=0) for each in deltas), default=0)
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
    parts = [_LEAD.pack(RECORD_VERSION, width)]
    for delta in deltas:
        parts += _encode(delta, width)
    return b"".join(parts)


def _encode(delta: Delta, width: int) -> tuple[bytes, bytes, bytes]:
    count = len(delta.tokens)
    if len(delta.logprobs) != count:
        raise ValueError(f"{count} tokens with {len(delta.logprobs)} log-probabilities")
    if (stamped := sum(stamp.count for stamp in delta.stamps)) != count:
        raise ValueError(f"{count} tokens with stamps for {stamped}")
    numbers = [delta.ordinal, delta.sample, delta.start, count, len(delta.stamps)]
    for stamp in delta.stamps:
        numbers += [stamp.generation, stamp.version, stamp.count]
    del numbers[-1 if delta.stamps else len(numbers) :]  # the last run has what is left
    try:
        ids = struct.pack(f"<{count}{_CODES[width]}", *delta.tokens)
        logprobs = struct.pack(f"<{count}f", *delta.logprobs)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{delta.sample=} of {delta.ordinal=} does not fit: {error}") from error
    if struct.unpack(f"<{count}f", logprobs) != delta.logprobs:
        raise ValueError(f"log-probabilities of sample {delta.sample} are not float32 numbers")
    return _numbers(numbers), ids, logprobs


def _numbers(values: Sequence[int]) -> bytes:
    data = bytearray()
    for value in values:
        if not 0 <= value < 1 << _NUMBER_BITS:
            raise ValueError(f"{value} does not fit: a number of a token record has 64 bits")
        rest = value
        while rest >= 0x80:
            data.append(rest & 0x7F | 0x80)
            rest >>= 7
        data.append(rest)
    return bytes(data)


def decode_deltas(record: bytes | memoryview) -> list[Delta]:
    """Return what `encode_deltas` wrote. Raises ``CorruptError`` saying what is wrong with it."""
    data = memoryview(record)
    if data.nbytes < _LEAD.size:
        raise CorruptError(f"a token record of {data.nbytes} bytes; it has at least {_LEAD.size}")
    version, width = _LEAD.unpack_from(data)
    if version != RECORD_VERSION:
        raise CorruptError(
            f"a token record of version {version}; this program reads {RECORD_VERSION}: read it "
            "with the program that wrote it"
        )
    if width not in _CODES:
        raise CorruptError(f"a token record with ids of {width} bytes; there are 1, 2 and 4")
    reader, deltas = _Reader(data, _LEAD.size), []
    while reader.at < data.nbytes:
        deltas.append(reader.delta(width))
    return deltas


class _Reader:
    """Takes a record apart from ``at`` on."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self.at = data, at

    def delta(self, width: int) -> Delta:
        ordinal, sample, start, count, runs = (self._number() for _ in range(5))
        stamps, left = [], count
        for run in range(runs):
            generation, version = self._number(), self._number()
            tokens = left if run == runs - 1 else self._number()
            stamps.append(Stamp(generation=generation, version=version, count=tokens))
            left -= tokens
            if left < 0:
                break
        if left:
            raise CorruptError(f"a token record of {count} tokens with stamps for {count - left}")
        nbytes = count * (width + _LOGPROB_BYTES)
        if nbytes > self._data.nbytes - self.at:
            raise CorruptError(
                f"a token record of {self._data.nbytes} bytes; {count} tokens at byte {self.at} "
                f"need {nbytes}"
            )
        ids = struct.unpack_from(f"<{count}{_CODES[width]}", self._data, self.at)
        logprobs = struct.unpack_from(f"<{count}f", self._data, self.at + count * width)
        self.at += nbytes
        if any(math.isnan(each) for each in logprobs):
            raise CorruptError(f"a token record of sample {sample} with a log-probability of NaN")
        return Delta(
            ordinal=ordinal,
            sample=sample,
            start=start,
            tokens=ids,
            logprobs=logprobs,
            stamps=tuple(stamps),
        )

    def _number(self) -> int:
        value = 0
        for shift in range(0, _NUMBER_BITS, 7):
            if self.at >= self._data.nbytes:
                break
            byte = self._data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise CorruptError(f"a token record of {self._data.nbytes} bytes ends within a number")


def fold(records: Iterable[bytes | memoryview]) -> dict[SampleId, Delta]:
    """Join the records of a log into one delta per sample, starting at 0.

    A part that starts over (a sample handed back to the same worker) replaces what it overlaps;
    one behind a gap is ignored, since what it would follow was released. Raises ``CorruptError``
    for a record that is none.
    """
    joined: dict[SampleId, Delta] = {}
    for piece in _pieces(records):
        key = (piece.ordinal, piece.sample)
        before = joined.get(key)
        length = len(before.tokens) if before else 0
        if piece.start > length:
            continue
        joined[key] = piece if before is None else _join(before, piece)
    return joined


def _pieces(records: Iterable[bytes | memoryview]) -> Iterator[Delta]:
    for record in records:
        yield from decode_deltas(record)


def _join(before: Delta, piece: Delta) -> Delta:
    return Delta(
        ordinal=piece.ordinal,
        sample=piece.sample,
        start=0,
        tokens=before.tokens[: piece.start] + piece.tokens,
        logprobs=before.logprobs[: piece.start] + piece.logprobs,
        stamps=extend_stamps(cut_stamps(before.stamps, piece.start), piece.stamps),
    )
