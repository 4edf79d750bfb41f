"""Observed tokens are context, distinct from sampled ones in trajectories, records, batches."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch

from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import BatchPlan
from holdfast.adapters.rl.ledger.states import DeliveryVerdict
from holdfast.adapters.rl.loss.batch import collate
from holdfast.adapters.rl.samples.token_log import TokenLog
from holdfast.adapters.rl.samples.token_record import decode_deltas, encode_deltas, fold
from holdfast.adapters.rl.samples.trajectory import Delta, Stamp, Trajectory, Turn, TurnLimits
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.sidecar.logs.frames import framed_bytes

LIMITS = TurnLimits(end=10, context=16, max_new_tokens=4, turns=True)
EPISODE = Trajectory(
    ordinal=3,
    sample=1,
    prompt=tuple(b"q>"),
    tokens=tuple(b"ab\nhint>cd\n"),
    logprobs=(-0.5, -0.25, -0.125, -1.0, -2.0, -4.0),
    stamps=(Stamp(generation=1, version=4, count=4), Stamp(generation=2, version=5, count=2)),
    turns=(
        Turn(end=3, observed=5, state='{"n":1}'),
        Turn(end=11, observed=0, state="null", reward=0.5, reason="tool lost"),
    ),
)
"""Two turns of three tokens, the second over with a reward; version 5 took over in the second."""


def change(**fields: object) -> Trajectory:
    return Trajectory(**{n: getattr(EPISODE, n) for n in EPISODE.__struct_fields__} | fields)


def delta(**fields: object) -> Delta:
    names = [name for name in EPISODE.__struct_fields__ if name != "prompt"]
    return Delta(**{name: getattr(EPISODE, name) for name in names} | {"start": 0} | fields)


def test_sampled_tokens_are_told_apart_from_observed_ones() -> None:
    assert EPISODE.sampled == 6
    assert [bytes(EPISODE.tokens[a:b]) for a, b in EPISODE.spans] == [b"ab\n", b"cd\n"]
    assert EPISODE.token_versions == [4, 4, 4, 4, 5, 5]
    assert (EPISODE.reward, EPISODE.reason) == (0.5, "tool lost")


@pytest.mark.parametrize(
    ("count", "text", "turns"),
    [
        (0, b"", 0),
        (2, b"ab", 0),
        (3, b"ab\nhint>", 1),
        (4, b"ab\nhint>c", 1),
        (6, b"ab\nhint>cd\n", 2),
    ],
)
def test_a_beginning_has_what_was_replied_to_it_and_no_more(
    count: int, text: bytes, turns: int
) -> None:
    beginning = EPISODE.first(count)
    assert (bytes(beginning.tokens), len(beginning.turns)) == (text, turns)
    assert beginning.sampled == count


def test_a_turn_is_over_by_its_own_length_and_an_episode_by_its_reward() -> None:
    started = EPISODE.first(3)
    assert not LIMITS.turn_over(started), "the reply is there: the next turn begins"
    assert LIMITS.turn_over(
        change(
            tokens=EPISODE.tokens[:3],
            logprobs=(-1.0,) * 3,
            stamps=(Stamp(generation=1, version=4, count=3),),
            turns=(),
        )
    )
    assert not LIMITS.finished(started)
    assert LIMITS.finished(EPISODE)
    assert not LIMITS.over(2, 3, 97)
    assert LIMITS.over(2, 4, 97)
    assert LIMITS.over(13, 3, 97)


def test_a_reply_is_appended_with_its_state() -> None:
    said = change(
        tokens=EPISODE.tokens[:3],
        logprobs=EPISODE.logprobs[:3],
        stamps=(Stamp(generation=1, version=4, count=3),),
        turns=(),
    )
    assert said.state == "null"
    replied = said.replied(tuple(b"hint>"), state='{"n":1}')
    assert replied == EPISODE.first(3)
    assert (replied.turn_start, replied.state, replied.reward) == (8, '{"n":1}', None)


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ((Turn(end=0, observed=5, state=""),), "ends at 0"),
        ((Turn(end=9, observed=5, state=""),), "with 5 tokens observed, within those from 1 to 11"),
        ((Turn(end=9, observed=-1, state=""),), "with -1 tokens"),
        ((Turn(end=3, observed=5, state=""), Turn(end=8, observed=0, state="")), "ends at 8"),
        ((Turn(end=3, observed=5, state="", reward=1.0),), "over at 3 has tokens up to 11"),
        ((Turn(end=3, observed=4, state=""),), "7 tokens with 6 log-probabilities"),
    ],
)
def test_turns_that_do_not_fit_the_tokens_are_refused(
    turns: tuple[Turn, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        change(turns=turns)


# -- records -------------------------------------------------------------------------------------


def test_a_record_of_turns_comes_back_bit_for_bit() -> None:
    tail = delta(
        start=3,
        tokens=EPISODE.tokens[3:],
        logprobs=EPISODE.logprobs[3:],
        stamps=(Stamp(generation=1, version=4, count=1), EPISODE.stamps[1]),
    )
    last = delta(start=11, tokens=(), logprobs=(), stamps=(), turns=EPISODE.turns[1:])
    written = [delta(), tail, last]
    assert decode_deltas(encode_deltas(written)) == written


def test_pieces_join_to_the_episode_wherever_they_were_cut() -> None:
    pieces = [
        delta(
            tokens=EPISODE.tokens[:3],
            logprobs=EPISODE.logprobs[:3],
            stamps=(Stamp(generation=1, version=4, count=3),),
            turns=(),
        ),
        delta(start=3, tokens=EPISODE.tokens[3:8], logprobs=(), stamps=(), turns=EPISODE.turns[:1]),
        delta(
            start=8,
            tokens=EPISODE.tokens[8:],
            logprobs=EPISODE.logprobs[3:],
            stamps=(Stamp(generation=1, version=4, count=1), EPISODE.stamps[1]),
            turns=(),
        ),
        delta(start=11, tokens=(), logprobs=(), stamps=(), turns=EPISODE.turns[1:]),
    ]
    records = [encode_deltas([piece]) for piece in pieces]
    for count in range(1, 5):
        found = fold(records[:count])[3, 1].whole(EPISODE.prompt)
        assert found.tokens == EPISODE.tokens[: len(found.tokens)]
    assert found == EPISODE
    assert fold([*records, *records[2:]])[3, 1] == fold(records)[3, 1]
    assert fold([*records, records[0]])[3, 1] == pieces[0], "it was begun anew"


def test_an_answer_without_an_environment_takes_no_byte_for_it() -> None:
    plain = Delta(
        ordinal=1,
        sample=0,
        start=0,
        tokens=(97, 98),
        logprobs=(-0.5, -0.5),
        stamps=(Stamp(generation=1, version=2, count=2),),
    )
    assert len(encode_deltas([plain])) == 2 + 7 + 2 * (1 + 4)


def test_a_sampled_token_of_an_episode_takes_at_most_sixteen_bytes() -> None:
    """Turns of 64 tokens, replies of 32, a state of 40 bytes; four tokens of each in a record."""
    nbytes = sampled = 0
    state = '{"first":0.25,"step":3,"file":"main.py"}'
    for turn in range(8):
        base = turn * 96
        for start in range(0, 64, 4):
            at = base + start
            nbytes += framed_bytes(encode_deltas([_text(slot, at, 4) for slot in range(8)]))
        reply = (Turn(end=base + 64, observed=32, state=state),)
        deltas = [_text(slot, base + 64, 32, turns=reply) for slot in range(8)]
        nbytes += framed_bytes(encode_deltas(deltas))
        sampled += 8 * 64
    assert 11.0 < nbytes / sampled <= 16.0


def _text(slot: int, start: int, count: int, turns: tuple[Turn, ...] = ()) -> Delta:
    own = 0 if turns else count
    return Delta(
        ordinal=1_000_000 + slot,
        sample=slot % 4,
        start=start,
        tokens=(50_000,) * count,
        logprobs=(-0.5,) * own,
        stamps=(Stamp(generation=40, version=20_000, count=own),) if own else (),
        turns=turns,
    )


REWARD = struct.pack("<d", 0.5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace(REWARD, struct.pack("<d", float("nan"))), "reward of nan"),
        (lambda text: text.replace(b"tool", b"\xff\xfe\xfd\xfc"), "no text"),
        (lambda text: text[:-1], "a turn at byte"),
        (lambda text: text.replace(b"\x03\x05\x00\x07", b"\x00\x05\x00\x07"), "ends at 0"),
        (lambda text: text.replace(b"\x03\x05\x00\x07", b"\x03\x7f\x00\x07"), "more are observed"),
        (lambda text: text.replace(b"\x03\x05\x00\x07", b"\x03\x04\x00\x07"), "a turn at byte"),
    ],
)
def test_a_record_with_turns_that_are_none_is_refused(
    damage: Callable[[bytes], bytes], message: str
) -> None:
    record = encode_deltas([delta()])
    assert damage(record) != record
    with pytest.raises(CorruptError, match=message):
        decode_deltas(damage(record))


def test_a_reward_that_is_no_number_is_not_written() -> None:
    turns = (*EPISODE.turns[:1], Turn(end=11, observed=0, state="", reward=float("inf")))
    with pytest.raises(ValueError, match="reward of inf"):
        encode_deltas([delta(turns=turns)])


# -- batches and the ledger ----------------------------------------------------------------------


def test_observed_tokens_are_in_the_batch_and_masked_out() -> None:
    batch = collate([EPISODE], torch.tensor([0.5]), rows=2, length=16)
    assert bytes(batch.tokens[0, :13].tolist()) == b"q>ab\nhint>cd\n"
    wanted = [0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert batch.mask.tolist() == [wanted, [0] * 15]
    assert batch.behavior[0][batch.mask[0] > 0].tolist() == list(EPISODE.logprobs)
    assert batch.behavior[0][batch.mask[0] == 0].abs().sum() == 0
    assert batch.versions[0][batch.mask[0] > 0].tolist() == [4, 4, 4, 4, 5, 5]
    assert (batch.token_count, batch.sampled_by) == (6, [4, 5])
    assert batch.trimmed().tokens.shape == (2, 13)


def make_ledger() -> Ledger:
    limits = msgspec.structs.replace(LIMITS, max_new_tokens=8)
    ledger = Ledger(BatchPlan(groups=4, group=2, eta=2, steps=4, limits=limits))
    ledger.resume(1, restored=0)
    ledger.admit(0, lambda _: tuple(b"q>"))
    return ledger


def stamped(trajectory: Trajectory, generation: int = 1) -> Trajectory:
    stamps = (Stamp(generation=generation, version=0, count=trajectory.sampled),)
    return msgspec.structs.replace(trajectory, stamps=stamps if trajectory.sampled else ())


def test_the_ledger_counts_sampled_tokens_and_keeps_replies_with_a_partial_episode() -> None:
    ledger = make_ledger()
    partial = stamped(EPISODE.first(3))
    assert ledger.recover(stamped(EPISODE.first(2))) is DeliveryVerdict.ACCEPTED
    assert ledger.recover(partial) is DeliveryVerdict.ACCEPTED
    assert ledger.counters.tokens_recovered == 5
    state = msgspec.json.decode(msgspec.json.encode(ledger.state_dict()))
    again = make_ledger()
    again.load_state_dict(state)
    work = again.claim("w", free=16, version=None)
    assert partial in [each.trajectory for each in work]
    assert again.deliver(stamped(EPISODE)) is DeliveryVerdict.ACCEPTED
    assert again.counters.tokens_sampled == 6


def test_what_was_replied_to_tokens_of_an_undone_version_is_forgotten() -> None:
    ledger = make_ledger()
    mixed = msgspec.structs.replace(
        EPISODE,
        stamps=(Stamp(generation=1, version=0, count=4), Stamp(generation=1, version=2, count=2)),
    )
    ledger.resume(2, restored=0)
    assert ledger.deliver(mixed) is DeliveryVerdict.ROLLED_BACK
    (kept,) = [w.trajectory for w in ledger.claim("w", free=99, version=0) if w.trajectory.tokens]
    assert kept == mixed.first(4)
    assert kept.reward is None


def test_deliveries_differ_without_blame_only_where_a_call_was_given_up() -> None:
    ledger = make_ledger()
    decided = msgspec.structs.replace(
        stamped(EPISODE),
        turns=(EPISODE.turns[0], Turn(end=11, observed=0, state="null", reward=1.0)),
    )
    other = msgspec.structs.replace(
        decided, turns=(EPISODE.turns[0], Turn(end=11, observed=0, state="null", reward=0.25))
    )
    ledger.deliver(decided)
    assert ledger.deliver(stamped(EPISODE), again=True) is DeliveryVerdict.DUPLICATE
    assert ledger.check() == []
    ledger.deliver(other, again=True)
    assert ledger.check() == ["sample (3, 1) was delivered in two versions"]


class Records:
    """A log that is a list."""

    def __init__(self) -> None:
        self.records = list[bytes]()

    def log_open(self, name: str) -> int:
        return 0

    def log_append(self, name: str, records: Sequence[bytes]) -> int:
        self.records += records
        return len(self.records)

    def log_truncate(self, name: str, keep_from: int) -> None:
        pass


def test_long_states_are_cut_into_records_that_are_not_too_long() -> None:
    state = '"' + "s" * 4000 + '"'
    turns = (Turn(end=3, observed=5, state=state), Turn(end=11, observed=0, state=state))
    trajectories = [change(ordinal=ordinal, turns=turns) for ordinal in range(20)]
    log = Records()
    TokenLog(lambda: log, "w").append([], lambda: trajectories)
    assert len(log.records) > 4
    assert max(map(len, log.records)) < 40_000
    found = fold(log.records)
    assert [found[each.key].whole(each.prompt) for each in trajectories] == trajectories
