"""Token records, and a rollout worker's log over a long run with a real sidecar."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidecar_group import DEADLINE_S, SidecarGroup, sidecar_group

from holdfast.adapters.rl.samples import token_log
from holdfast.adapters.rl.samples.token_log import TokenLog
from holdfast.adapters.rl.samples.token_record import decode_deltas, encode_deltas, fold
from holdfast.adapters.rl.samples.trajectory import Delta, Stamp, Trajectory
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.sidecar.logs import record_log
from holdfast.ckpt.sidecar.logs.frames import framed_bytes

LOGPROBS = st.floats(width=32, allow_nan=False)

MAX_ID = (1 << 32) - 1


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    counts = draw(st.lists(st.integers(1, 5), max_size=3))
    total = sum(counts)
    u64 = st.integers(0, 2**64 - 1)
    ids = st.integers(0, draw(st.sampled_from((255, 256, 65_535, 65_536, MAX_ID))))
    return Delta(
        ordinal=draw(u64),
        sample=draw(u64),
        start=draw(u64),
        tokens=tuple(draw(ids) for _ in range(total)),
        logprobs=tuple(draw(LOGPROBS) for _ in range(total)),
        stamps=tuple(
            Stamp(generation=draw(u64), version=draw(u64), count=count) for count in counts
        ),
    )


def delta(tokens: Sequence[int] = b"abcd", **fields: object) -> Delta:
    plain = {
        "ordinal": 3,
        "sample": 1,
        "start": 0,
        "tokens": tuple(tokens),
        "logprobs": (-0.5,) * len(tokens),
        "stamps": (Stamp(generation=1, version=2, count=len(tokens)),),
    }
    return Delta(**(plain | fields))


@given(written=st.lists(deltas(), max_size=4))
def test_a_token_record_comes_back_bit_for_bit(written: list[Delta]) -> None:
    assert decode_deltas(encode_deltas(written)) == written


@given(written=st.lists(deltas(), max_size=3), data=st.data())
def test_a_record_with_any_byte_changed_or_cut_is_refused_or_read_and_no_more(
    written: list[Delta], data: st.DataObject
) -> None:
    record = bytearray(encode_deltas(written))
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    del record[data.draw(st.integers(0, len(record))) :]
    with contextlib.suppress(CorruptError):
        decode_deltas(bytes(record))


def stored_bytes_per_token(slots: int, *, per_record: int, vocabulary: int) -> float:
    """Return what a token takes in a log, frame included, in the middle of a long run.

    ``slots`` sequences of 512 tokens each grow side by side; ``per_record`` tokens of each are in
    a record, as after so many ticks.
    """
    draw = random.Random(0)
    total = nbytes = 0
    for start in range(0, 512, per_record):
        stamp = Stamp(generation=40, version=20_000 + start // 256, count=per_record)
        parts = [
            delta(
                [draw.randrange(vocabulary) for _ in range(per_record)],
                ordinal=1_000_000 + slot // 4,
                sample=slot % 4,
                start=start,
                stamps=(stamp,),
            )
            for slot in range(slots)
        ]
        nbytes += framed_bytes(encode_deltas(parts))
        total += slots * per_record
    return nbytes / total


@pytest.mark.parametrize(
    ("slots", "per_record", "vocabulary", "most"),
    [
        (32, 4, 256, 8.6),
        (32, 4, 50_257, 9.6),
        (32, 4, 151_936, 11.6),
        (8, 4, 151_936, 12.0),
        (1, 4, 151_936, 16.0),
        (8, 16, 151_936, 9.1),
        (1, 512, 151_936, 8.1),
    ],
)
def test_a_token_takes_few_bytes_whatever_the_vocabulary(
    slots: int, per_record: int, vocabulary: int, most: float
) -> None:
    found = stored_bytes_per_token(slots, per_record=per_record, vocabulary=vocabulary)
    assert most - 1.1 < found <= most <= 16


def test_the_largest_id_decides_what_all_of_a_record_take() -> None:
    sizes = [len(encode_deltas([delta([0, 0, 0, last])])) for last in (255, 256, 1 << 16, MAX_ID)]
    assert [size - sizes[0] for size in sizes] == [0, 4, 12, 12]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:1], "1 bytes; it has at least 2"),
        (lambda text: bytes([9]) + text[1:], "version 9"),
        (lambda text: text[:1] + b"\3" + text[2:], "ids of 3 bytes"),
        (lambda text: text[:-1], "4 tokens at byte 9 need 20"),
        (lambda text: text + b"x", "ends within a number"),
        (lambda text: text[:2] + b"\xff" * 12, "ends within a number"),
        (lambda text: text[:6] + b"\0" + text[7:], "4 tokens with stamps for 0"),
        (lambda text: text[:6] + b"\4" + text[7:9] + b"\5\1\1" + text[9:], "stamps for 5"),
        (lambda text: text[:-4] + struct.pack("<f", float("nan")), "NaN"),
        (lambda text: b'{"ordinal":3,"sample":1,"start":0}', "version 123"),
    ],
)
def test_a_record_that_is_none_is_refused_with_its_fault(damage, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        decode_deltas(damage(encode_deltas([delta()])))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ordinal": -1}, "does not fit"),
        ({"sample": 1 << 64}, "does not fit"),
        ({"tokens": (1, 2, 3, MAX_ID + 1)}, "does not fit"),
        ({"tokens": (1, 2, 3, -1)}, "does not fit"),
        ({"stamps": (Stamp(generation=1, version=2, count=3),)}, "4 tokens with stamps for 3"),
        ({"logprobs": (-0.1,) * 4}, "not float32"),
        ({"logprobs": (-0.5,) * 3}, "4 tokens with 3 log-probabilities"),
    ],
)
def test_what_a_record_cannot_hold_exactly_is_refused(
    wrong: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        encode_deltas([delta(**wrong)])


# -- over a long run -----------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c") as group:
        yield group


def trajectory(ordinal: int, tokens: int) -> Trajectory:
    return Trajectory(
        ordinal=ordinal,
        sample=0,
        prompt=(112,),
        tokens=(116,) * tokens,
        logprobs=(-0.5,) * tokens,
        stamps=(Stamp(generation=1, version=ordinal, count=tokens),),
    )


def resident_kib(group: SidecarGroup) -> int:
    """Return the resident memory of the writer's and the holder's process."""
    total = 0
    for node in ("a", "b"):
        status = Path(f"/proc/{group.processes[node].pid}/status").read_text()
        total += int(next(x for x in status.splitlines() if x.startswith("VmRSS")).split()[1])
    return total


def test_a_thousand_trajectories_are_logged_trained_and_let_go_in_flat_memory(
    group: SidecarGroup,
) -> None:
    group.adopt()
    client = group.clients["a"]
    log = TokenLog(lambda: client, "rollout-0-x")
    trajectories: list[Trajectory] = []
    seen, resident = [], []
    for ordinal in range(1200):
        whole = trajectory(ordinal, 64)
        for start in range(0, 64, 16):
            part = whole.tokens[start : start + 16]
            stamp = Stamp(generation=1, version=ordinal, count=16)
            piece = delta(part, ordinal=ordinal, sample=0, start=start, stamps=(stamp,))
            log.append([piece], trajectories.copy)
        trajectories.append(whole)
        if ordinal % 10 == 9:  # a step: the older half is trained and protected
            del trajectories[:-20]
            log.release(trajectories[0].ordinal)
        if ordinal % 100 == 99:
            seen.append(client.status()["bytes"]["logs"])
            resident.append(resident_kib(group))
    assert max(seen) <= 4 * record_log.GRAIN_BYTES
    assert resident[-1] - resident[1] < 4096, resident
    end = client.log_open("rollout-0-x")
    assert client.log_protected("rollout-0-x", at_least=end, timeout_s=DEADLINE_S) == end
    assert group.clients["b"].status()["bytes"]["logs"] <= 4 * record_log.GRAIN_BYTES
    group.kill("a", wipe=True)
    found = fold(group.clients["c"].log_read("rollout-0-x", node="a"))
    for each in trajectories:
        assert found[each.key].tokens == each.tokens


def test_a_log_that_begins_anew_lets_go_of_what_it_repeats(
    group: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_log, "_REOPEN_S", 0.0)
    group.adopt()
    client = group.clients["a"]
    trajectories = [trajectory(1, 8)]
    log = TokenLog(lambda: client, "w")
    log.append([], lambda: trajectories)
    client.log_drop("w", node="a")  # given up by mistake: it lives
    log.append([delta()], lambda: trajectories)  # refused: begins anew the next time
    for _ in range(3):
        log = TokenLog(lambda: client, "w")
        log.append([], lambda: trajectories)
    (record,) = client.log_read("w", node="a")
    assert [piece.tokens for piece in decode_deltas(record)] == [(116,) * 8]


def test_what_is_held_is_cut_into_records_that_are_not_too_long(
    group: SidecarGroup,
) -> None:
    group.adopt()
    client = group.clients["a"]
    trajectories = [trajectory(ordinal, 1500) for ordinal in range(7)]
    log = TokenLog(lambda: client, "w")
    log.append([], lambda: trajectories)
    records = client.log_read("w", node="a")
    assert [len(decode_deltas(record)) for record in records] == [2, 2, 2, 1]
    assert {key: piece.tokens for key, piece in fold(records).items()} == {
        each.key: each.tokens for each in trajectories
    }


def test_a_worker_whose_log_has_no_room_samples_on_and_says_so_once(
    group: SidecarGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_log, "_REOPEN_S", 0.0)
    world = group.adopt()
    tight = msgspec.structs.replace(world, generation=2, memory_bytes=1 << 20)
    for client in group.clients.values():
        client.adopt(tight, restore=None)
    client = group.clients["a"]
    log = TokenLog(lambda: client, "w")
    trajectories = [trajectory(ordinal, 1500) for ordinal in range(40)]
    for _ in range(3):
        log.append([], lambda: trajectories)
    (said,) = [each.getMessage() for each in caplog.records if each.name == token_log.__name__]
    assert "w is sampled without a token log: the logs of node a" in said
    assert "memory=1,048,576" in said
    log.append([], lambda: trajectories[:4])
    found = fold(client.log_read("w", node="a"))
    assert found.keys() == {each.key for each in trajectories[:4]}
