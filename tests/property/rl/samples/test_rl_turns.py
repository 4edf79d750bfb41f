"""Any episode is restored from a log cut anywhere, and so are its beginnings."""

from __future__ import annotations

import contextlib

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.adapters.rl.ledger.counters import Books, spoken
from holdfast.adapters.rl.loss.batch import collate
from holdfast.adapters.rl.rollout.engine import Logged, unlogged
from holdfast.adapters.rl.samples.token_record import decode_deltas, encode_deltas, fold
from holdfast.adapters.rl.samples.trajectory import (
    Stamp,
    Trajectory,
    check_tokens,
    extend_stamps,
    sampled_before,
)
from holdfast.ckpt.errors import CorruptError

STATES = st.sampled_from(["null", "{}", '{"tried":["é",3]}', "[" + "7," * 40 + "7]"])
TOKENS = st.integers(0, 300)


def say(trajectory: Trajectory, tokens: list[int], version: int) -> Trajectory:
    """Return the trajectory with more sampled tokens."""
    stamp = Stamp(generation=1, version=version, count=len(tokens))
    return Trajectory(
        ordinal=trajectory.ordinal,
        sample=trajectory.sample,
        prompt=trajectory.prompt,
        tokens=(*trajectory.tokens, *tokens),
        logprobs=(*trajectory.logprobs, *(-0.5 * token for token in tokens)),
        stamps=extend_stamps(trajectory.stamps, [stamp]),
        turns=trajectory.turns,
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Trajectory]:
    """Return an episode as it stood after each thing that happened to it."""
    now = Trajectory(ordinal=draw(st.integers(0, 2**40)), sample=2, prompt=(1, 2, 3))
    found, version = [now], 0
    turns = draw(st.integers(1, 4))
    for turn in range(turns):
        for tokens in draw(
            st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=3)
        ):
            version += draw(st.integers(0, 1))
            found.append(say(found[-1], tokens, version))
        if turn == turns - 1 and draw(st.booleans()):
            reason = draw(st.sampled_from(["", "no reply in 60 s"]))
            rewards = tuple(draw(st.lists(st.floats(-1, 1), max_size=3)))
            ending = found[-1].replied(
                (), state=draw(STATES), reward=0.25, reason=reason, rewards=rewards
            )
            found.append(ending)
        elif turn < turns - 1 or draw(st.booleans()):
            observed = tuple(draw(st.lists(TOKENS, max_size=5)))
            then = draw(st.integers(0, 2))
            found.append(found[-1].replied(observed, state=draw(STATES), then=then))
    return found


def extent(trajectory: Trajectory) -> Logged:
    return len(trajectory.tokens), len(trajectory.turns)


@given(history=histories(), data=st.data())
def test_a_log_cut_anywhere_folds_back_to_the_episode(
    history: list[Trajectory], data: st.DataObject
) -> None:
    logged, records = (0, 0), list[bytes]()
    for now in history:
        if data.draw(st.booleans()) or now is history[-1]:
            if data.draw(st.integers(0, 9)) == 0:
                logged = (0, 0)  # a log that begins anew
            piece = unlogged(now, logged)
            check_tokens(piece, start=piece.start)
            assert decode_deltas(encode_deltas([piece])) == [piece]
            records.append(encode_deltas([piece]))
            logged = extent(now)
            assert fold(records)[now.key].whole(now.prompt) == now


@given(history=histories())
def test_every_beginning_is_one_the_episode_had(history: list[Trajectory]) -> None:
    whole = history[-1]
    for count in range(whole.sampled + 1):
        beginning = whole.first(count)
        assert beginning.sampled == count
        assert whole.tokens[: len(beginning.tokens)] == beginning.tokens
        assert whole.turns[: len(beginning.turns)] == beginning.turns
        assert beginning.first(count) == beginning
        assert sampled_before(whole.turns, len(beginning.tokens)) == count
    for earlier in history:
        same = whole.first(earlier.sampled)
        assert same.tokens[: len(earlier.tokens)] == earlier.tokens, "with what was replied since"


@given(history=histories())
def test_the_mask_is_one_where_a_token_was_sampled(history: list[Trajectory]) -> None:
    alone = tuple(msgspec.structs.replace(turn, then=0) for turn in history[-1].turns)
    whole = msgspec.structs.replace(history[-1], turns=alone)
    length = len(whole.prompt) + len(whole.tokens) + 1
    batch = collate([whole], torch.zeros(1), rows=1, length=length)
    assert batch.token_count == whole.sampled
    at = batch.mask[0].nonzero()[:, 0]
    assert batch.behavior[0, at].tolist() == list(whole.logprobs)
    assert batch.versions[0, at].tolist() == whole.token_versions
    sampled = [token for start, stop in whole.spans for token in whole.tokens[start:stop]]
    assert batch.tokens[0, at + 1].tolist() == sampled


@given(history=histories())
def test_each_sampled_token_is_in_the_batch_of_one_policy_and_in_its_book(
    history: list[Trajectory],
) -> None:
    whole = history[-1]
    length = len(whole.prompt) + len(whole.tokens) + 1
    own = [
        collate([whole], torch.zeros(1), rows=2, length=length, speaker=speaker)
        for speaker in range(3)
    ]
    before = len(whole.prompt) - 1
    sampled = {before + at for start, stop in whole.spans for at in range(start, stop)}
    masks = torch.stack([each.mask[0] for each in own])
    assert masks.sum(0).tolist() == [float(at in sampled) for at in range(length - 1)]
    books = Books(("a", "b", "c"))
    books.add([whole])
    assert books.tokens == tuple(each.token_count for each in own)
    assert all(each.used.tolist() == [True, False] for each in own)
    counted = [*spoken(whole), 0, 0]
    assert tuple(counted[:3]) == books.tokens


@given(history=histories(), data=st.data())
def test_a_record_with_a_byte_changed_is_refused_or_read_and_no_more(
    history: list[Trajectory], data: st.DataObject
) -> None:
    record = bytearray(encode_deltas([unlogged(history[-1], (0, 0))]))
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    del record[data.draw(st.integers(0, len(record))) :]
    with contextlib.suppress(CorruptError):
        decode_deltas(bytes(record))
