"""The records of a rollout worker's log: the tokens sampled since the last record.

A record is ``[version u8][width u8]`` and one part per sample, one behind the other: the numbers
``ordinal, sample, start, count, runs``; for each run ``generation, policy version`` and, unless it
is the last, its tokens; then ``count`` token ids of ``width`` bytes and the log-probabilities
(float32) of the sampled ones among them, little-endian, without padding. Numbers are LEB128: seven
bits a byte, the lowest first. The sampling coordinate of token i of a part is (ordinal, sample,
start + i).

``runs`` is twice the number of runs, plus one if an environment replied within the part. Only then
the runs are followed by the number of such turns and for each ``end - start, observed, kind``, and
by the length in bytes of its state (as a number). ``kind`` has bit 0 set with a reward and bit 1
with a reason; the reason's length in bytes is one more number. Behind the log-probabilities there
are for each turn the state and the reason (UTF-8) and the reward (float64). So an answer without an
environment takes no extra byte.

The width is the least of 1, 2 and 4 that holds the ids of the record, so a vocabulary of any size
fits, and a small one costs no more than it must.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from holdfast.adapters.rl.samples.trajectory import (
    Delta,
    SampleId,
    Stamp,
    Turn,
    check_tokens,
    check_turns,
    cut_stamps,
    extend_stamps,
    sampled_before,
)
from holdfast.ckpt.errors import CorruptError

RECORD_VERSION: Final = 4
_LEAD: Final = struct.Struct("<BB")
_CODES: Final = {1: "B", 2: "H", 4: "I"}
_LOGPROB_BYTES: Final = 4
_REWARD: Final = struct.Struct("<d")
_HAS_REWARD: Final = 1
_HAS_REASON: Final = 2
_HAS_NEXT: Final = 4
_HAS_REWARDS: Final = 8
_NUMBER_BITS: Final = 64


def encode_deltas(deltas: Sequence[Delta]) -> bytes:
    """Return one log record of these deltas. Raises ``ValueError`` for values that do not fit."""
    largest = max((max(each.tokens, default=0) for each in deltas), default=0)
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
    parts = [_LEAD.pack(RECORD_VERSION, width)]
    for delta in deltas:
        parts += _encode(delta, width)
    return b"".join(parts)


def _encode(delta: Delta, width: int) -> tuple[bytes, ...]:
    check_tokens(delta, start=delta.start)
    count, sampled = len(delta.tokens), len(delta.logprobs)
    runs = 2 * len(delta.stamps) + bool(delta.turns)
    numbers = [delta.ordinal, delta.sample, delta.start, count, runs]
    for stamp in delta.stamps:
        numbers += [stamp.generation, stamp.version, stamp.count]
    del numbers[-1 if delta.stamps else len(numbers) :]  # the last run has the remaining tokens
    turns = _encode_turns(delta, numbers) if delta.turns else b""
    try:
        ids = struct.pack(f"<{count}{_CODES[width]}", *delta.tokens)
        logprobs = struct.pack(f"<{sampled}f", *delta.logprobs)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{delta.sample=} of {delta.ordinal=} does not fit: {error}") from error
    if struct.unpack(f"<{sampled}f", logprobs) != delta.logprobs:
        raise ValueError(f"log-probabilities of sample {delta.sample} are not float32 numbers")
    return _numbers(numbers), ids, logprobs, turns


def _encode_turns(delta: Delta, numbers: list[int]) -> bytes:
    """Add the turns' numbers to ``numbers``; return the bytes behind the log-probabilities."""
    numbers.append(len(delta.turns))
    data = bytearray()
    for turn in delta.turns:
        state, reason = turn.state.encode(), turn.reason.encode()
        kind = _HAS_REWARD * (turn.reward is not None) | _HAS_REASON * bool(reason)
        kind |= _HAS_NEXT * bool(turn.then) | _HAS_REWARDS * bool(turn.rewards)
        numbers += [turn.end - delta.start, turn.observed, kind, len(state)]
        data += state
        if reason:
            numbers.append(len(reason))
            data += reason
        if turn.then:
            numbers.append(turn.then)
        if turn.rewards:
            numbers.append(len(turn.rewards))
        for reward in (() if turn.reward is None else (turn.reward,)) + turn.rewards:
            if not math.isfinite(reward):
                raise ValueError(f"sample {delta.sample} with a reward of {reward}")
            data += _REWARD.pack(reward)
    return bytes(data)


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
    """Return the deltas that `encode_deltas` wrote. Raises ``CorruptError`` with the reason."""
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
        raise CorruptError(f"a token record with ids of {width} bytes; 1, 2 and 4 are possible")
    reader, deltas = _Reader(data, _LEAD.size), []
    while reader.at < data.nbytes:
        deltas.append(reader.delta(width))
    return deltas


_Sizes = tuple[int, int, int, int]
"""Bytes of a turn's state, reason, reward and rewards by policy."""


class _Reader:
    """Parses a record, from position ``at`` on."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self.at = data, at

    def delta(self, width: int) -> Delta:
        ordinal, sample, start, count, runs = (self._number() for _ in range(5))
        runs, has_turns = divmod(runs, 2)
        marks = [(self._number(), self._number(), self._rest(run, runs)) for run in range(runs)]
        rewarded = self._told_turns(start) if has_turns else []
        sampled = count - sum(turn.observed for turn, _ in rewarded)
        if sampled < 0:
            raise CorruptError(f"a token record of {count} tokens of which more are observed")
        stamps = _stamps(marks, sampled)
        self._need(count * width + sampled * _LOGPROB_BYTES, f"{count} tokens")
        ids = struct.unpack_from(f"<{count}{_CODES[width]}", self._data, self.at)
        self.at += count * width
        logprobs = struct.unpack_from(f"<{sampled}f", self._data, self.at)
        self.at += sampled * _LOGPROB_BYTES
        if any(math.isnan(each) for each in logprobs):
            raise CorruptError(f"a token record of sample {sample} with a log-probability of NaN")
        turns = tuple([self._turn(turn, sizes) for turn, sizes in rewarded])
        try:
            check_turns(turns, start=start, count=count)
        except ValueError as error:
            raise CorruptError(f"a token record of sample {sample} with {error}") from error
        return Delta(
            ordinal=ordinal,
            sample=sample,
            start=start,
            tokens=ids,
            logprobs=logprobs,
            stamps=stamps,
            turns=turns,
        )

    def _rest(self, run: int, runs: int) -> int | None:
        """Return the tokens of a run; None for the last one, which has all the remaining tokens."""
        return None if run == runs - 1 else self._number()

    def _told_turns(self, start: int) -> list[tuple[Turn, _Sizes]]:
        """Return the turns without the data behind the log-probabilities, and that data's sizes."""
        found = []
        for _ in range(self._number()):
            end, observed, kind, state = (self._number() for _ in range(4))
            reason = self._number() if kind & _HAS_REASON else 0
            reward = _REWARD.size if kind & _HAS_REWARD else 0
            then = self._number() if kind & _HAS_NEXT else 0
            rewards = self._number() * _REWARD.size if kind & _HAS_REWARDS else 0
            turn = Turn(end=start + end, observed=observed, state="", then=then)
            found.append((turn, (state, reason, reward, rewards)))
        return found

    def _turn(self, turn: Turn, sizes: _Sizes) -> Turn:
        self._need(sum(sizes), "a turn")
        state, reason, reward, rewards = (self._take(size) for size in sizes)
        value = _REWARD.unpack(reward)[0] if reward else None
        values = tuple(each for (each,) in _REWARD.iter_unpack(rewards))
        for each in (value or 0.0, *values):
            if not math.isfinite(each):
                raise CorruptError(f"a token record with a reward of {each}")
        try:
            return Turn(
                end=turn.end,
                observed=turn.observed,
                state=state.decode(),
                reward=value,
                reason=reason.decode(),
                then=turn.then,
                rewards=values,
            )
        except UnicodeDecodeError as error:
            raise CorruptError(f"a token record with a turn that is no text: {error}") from error

    def _take(self, nbytes: int) -> bytes:
        self.at += nbytes
        return bytes(self._data[self.at - nbytes : self.at])

    def _need(self, nbytes: int, what: str) -> None:
        if nbytes > self._data.nbytes - self.at:
            raise CorruptError(
                f"a token record of {self._data.nbytes} bytes; {what} at byte {self.at} "
                f"need {nbytes}"
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


def _stamps(marks: Sequence[tuple[int, int, int | None]], sampled: int) -> tuple[Stamp, ...]:
    """Return the stamps of ``sampled`` tokens from (generation, version, tokens) of each run."""
    stamps, left = [], sampled
    for generation, version, stated_tokens in marks:
        tokens = left if stated_tokens is None else stated_tokens
        stamps.append(Stamp(generation=generation, version=version, count=tokens))
        left -= tokens
        if left < 0:
            break
    if left:
        raise CorruptError(f"a token record of {sampled} tokens with stamps for {sampled - left}")
    return tuple(stamps)


def fold(records: Iterable[bytes | memoryview]) -> dict[SampleId, Delta]:
    """Join the records of a log into one delta per sample, starting at 0.

    A part that starts over (a sample handed back to the same worker) replaces the tokens it
    overlaps. A part behind a gap is ignored, because its predecessor was released. Raises
    ``CorruptError`` for an invalid record.
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
    sampled = sampled_before(before.turns, piece.start)
    first = min((turn.end for turn in piece.turns), default=None)
    kept = [turn for turn in before.turns if turn.stop <= piece.start and turn.end != first]
    return Delta(
        ordinal=piece.ordinal,
        sample=piece.sample,
        start=0,
        tokens=before.tokens[: piece.start] + piece.tokens,
        logprobs=before.logprobs[:sampled] + piece.logprobs,
        stamps=extend_stamps(cut_stamps(before.stamps, sampled), piece.stamps),
        turns=(*kept, *piece.turns),
    )
