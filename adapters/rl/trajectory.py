"""A prompt's sampled tokens with their log-probabilities and policy versions. Pure values."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

import msgspec

from adapters.rl.task import END
from ckpt.errors import CorruptError
from ckpt.types import learn

SampleId = tuple[int, int]
"""(ordinal, sample): which of the samples of which prompt."""


_RECORD_VERSION = 1
_LEAD = struct.Struct("<BxHIIIQ")
_RUN = struct.Struct("<III")
_LOGPROB_BYTES = 4


class Stamp(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How many consecutive tokens were sampled in which generation by which policy version."""

    generation: int
    version: int
    count: int


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """The answer so far to prompt ``ordinal``, number ``sample`` of its group.

    ``logprobs`` are behavior log-probabilities, one per token of ``tokens`` (which excludes the
    prompt); the counts of ``stamps`` add up to the same number.
    """

    ordinal: int
    sample: int
    prompt: bytes
    tokens: bytes = b""
    logprobs: tuple[float, ...] = ()
    stamps: tuple[Stamp, ...] = ()

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.tokens):
            raise ValueError(
                f"{len(self.tokens)} tokens with {len(self.logprobs)} log-probabilities"
            )
        if (stamped := sum(stamp.count for stamp in self.stamps)) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens with stamps for {stamped}")

    @property
    def key(self) -> SampleId:
        """Return (ordinal, sample)."""
        return self.ordinal, self.sample

    @property
    def versions(self) -> frozenset[int]:
        """Return the policy versions that sampled it."""
        return frozenset(stamp.version for stamp in self.stamps)


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one trajectory from position ``start`` on: what a worker's log is made of."""

    ordinal: int
    sample: int
    start: int
    tokens: bytes
    logprobs: tuple[float, ...]
    stamps: tuple[Stamp, ...]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When an answer is over besides by its end token."""

    context: int
    max_new_tokens: int

    def finished(self, trajectory: Trajectory) -> bool:
        """Tell whether nothing more is to be sampled."""
        count = len(trajectory.tokens)
        return count > 0 and self.over(len(trajectory.prompt), count, trajectory.tokens[-1])

    def over(self, prompt_tokens: int, new_tokens: int, last: int) -> bool:
        """Tell whether an answer of ``new_tokens`` tokens that ends in ``last`` is over."""
        room = min(self.max_new_tokens, self.context - prompt_tokens)
        return last == END or new_tokens >= room


def encode_delta(delta: Delta) -> bytes:
    """Return the log record of a delta, little-endian and without padding between its parts.

    ``[version u8][0 u8][runs u16][count u32][sample u32][start u32][ordinal u64]``, then ``runs``
    times ``[generation u32][policy version u32][tokens u32]``, ``count`` token ids (u8), ``count``
    log-probabilities (float32). The sampling coordinate of token i is (ordinal, sample, start + i).
    Raises ``ValueError`` for what this cannot hold exactly.
    """
    count = len(delta.tokens)
    if len(delta.logprobs) != count:
        raise ValueError(f"{count} tokens with {len(delta.logprobs)} log-probabilities")
    try:
        lead = _LEAD.pack(
            _RECORD_VERSION, len(delta.stamps), count, delta.sample, delta.start, delta.ordinal
        )
        runs = b"".join(
            _RUN.pack(each.generation, each.version, each.count) for each in delta.stamps
        )
        logprobs = struct.pack(f"<{len(delta.logprobs)}f", *delta.logprobs)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{delta.sample=} of {delta.ordinal=} does not fit: {error}") from error
    if struct.unpack(f"<{count}f", logprobs) != delta.logprobs:
        raise ValueError(f"log-probabilities of sample {delta.sample} are not float32 numbers")
    return lead + runs + delta.tokens + logprobs


def decode_delta(record: bytes | memoryview) -> Delta:
    """Return what `encode_delta` wrote. Raises ``CorruptError`` saying what is wrong with it."""
    data = memoryview(record)
    if data.nbytes < _LEAD.size:
        raise CorruptError(f"a token record of {data.nbytes} bytes; it has at least {_LEAD.size}")
    version, runs, count, sample, start, ordinal = _LEAD.unpack_from(data)
    if version != _RECORD_VERSION:
        raise CorruptError(
            f"a token record of version {version}; this program reads {_RECORD_VERSION}: read it "
            "with the program that wrote it"
        )
    tokens_at = _LEAD.size + runs * _RUN.size
    wanted = tokens_at + count * (1 + _LOGPROB_BYTES)
    if data.nbytes != wanted:
        raise CorruptError(
            f"a token record of {data.nbytes} bytes; its {count} tokens need {wanted}"
        )
    stamps = tuple(
        Stamp(generation=generation, version=policy, count=tokens)
        for generation, policy, tokens in _RUN.iter_unpack(data[_LEAD.size : tokens_at])
    )
    if (stamped := sum(stamp.count for stamp in stamps)) != count:
        raise CorruptError(f"a token record of {count} tokens with stamps for {stamped}")
    logprobs = struct.unpack_from(f"<{count}f", data, tokens_at + count)
    if any(math.isnan(each) for each in logprobs):
        raise CorruptError(f"a token record of sample {sample} with a log-probability of NaN")
    return Delta(
        ordinal=ordinal,
        sample=sample,
        start=start,
        tokens=bytes(data[tokens_at : tokens_at + count]),
        logprobs=logprobs,
        stamps=stamps,
    )


def fold(records: Iterable[bytes | memoryview]) -> dict[SampleId, Delta]:
    """Join the records of a log into one delta per sample, starting at 0.

    A record that starts over (a sample handed back to the same worker) replaces what it
    overlaps; one behind a gap is ignored, since what it would follow was released. Raises
    ``CorruptError`` for a record that is none.
    """
    joined: dict[SampleId, Delta] = {}
    for record in records:
        piece = decode_delta(record)
        key = (piece.ordinal, piece.sample)
        before = joined.get(key)
        length = len(before.tokens) if before else 0
        if piece.start > length:
            continue
        joined[key] = piece if before is None else _join(before, piece)
    return joined


def _join(before: Delta, piece: Delta) -> Delta:
    return Delta(
        ordinal=piece.ordinal,
        sample=piece.sample,
        start=0,
        tokens=before.tokens[: piece.start] + piece.tokens,
        logprobs=before.logprobs[: piece.start] + piece.logprobs,
        stamps=extend_stamps(cut_stamps(before.stamps, piece.start), piece.stamps),
    )


def cut_stamps(stamps: Sequence[Stamp], count: int) -> tuple[Stamp, ...]:
    """Return the stamps of the first ``count`` tokens."""
    kept: list[Stamp] = []
    for stamp in stamps:
        if count <= 0:
            break
        take = min(stamp.count, count)
        kept.append(Stamp(generation=stamp.generation, version=stamp.version, count=take))
        count -= take
    return tuple(kept)


def extend_stamps(stamps: Sequence[Stamp], more: Sequence[Stamp]) -> tuple[Stamp, ...]:
    """Append stamps, merging neighbours of one generation and version."""
    joined = list(stamps)
    for stamp in more:
        last = joined[-1] if joined else None
        if last and (last.generation, last.version) == (stamp.generation, stamp.version):
            count = last.count + stamp.count
            joined[-1] = Stamp(generation=last.generation, version=last.version, count=count)
        elif stamp.count:
            joined.append(stamp)
    return tuple(joined)


learn(globals())
