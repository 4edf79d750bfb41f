"""Token records, and a rollout worker's log over a long run with a real sidecar."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidecar_group import DEADLINE_S, SidecarGroup, sidecar_group

from adapters.rl import token_log
from adapters.rl.token_log import TokenLog
from adapters.rl.trajectory import Delta, Stamp, Trajectory, decode_delta, encode_delta, fold
from ckpt.errors import CorruptError
from ckpt.sidecar import record_log

LOGPROBS = st.floats(width=32, allow_nan=False)


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    counts = draw(st.lists(st.integers(1, 5), max_size=3))
    total = sum(counts)
    u32 = st.integers(0, 2**32 - 1)
    return Delta(
        ordinal=draw(st.integers(0, 2**64 - 1)),
        sample=draw(u32),
        start=draw(u32),
        tokens=draw(st.binary(min_size=total, max_size=total)),
        logprobs=tuple(draw(LOGPROBS) for _ in range(total)),
        stamps=tuple(
            Stamp(generation=draw(u32), version=draw(u32), count=count) for count in counts
        ),
    )


def delta(tokens: bytes = b"abcd", **fields: object) -> Delta:
    plain = {
        "ordinal": 3,
        "sample": 1,
        "start": 0,
        "tokens": tokens,
        "logprobs": (-0.5,) * len(tokens),
        "stamps": (Stamp(generation=1, version=2, count=len(tokens)),),
    }
    return Delta(**(plain | fields))


@given(delta=deltas())
def test_a_token_record_comes_back_bit_for_bit(delta: Delta) -> None:
    assert decode_delta(encode_delta(delta)) == delta


def test_a_token_record_is_small() -> None:
    assert len(encode_delta(delta(b"x" * 32))) / 32 <= 6.2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:10], "10 bytes; it has at least 24"),
        (lambda text: bytes([9]) + text[1:], "version 9"),
        (lambda text: text[:-1], "its 4 tokens need"),
        (lambda text: text + b"x", "its 4 tokens need"),
        (lambda text: text[:32] + b"\5" + text[33:], "4 tokens with stamps for 5"),
        (lambda text: text[:-4] + struct.pack("<f", float("nan")), "NaN"),
        (lambda text: b'{"ordinal":3,"sample":1,"start":0}', "version 123"),
    ],
)
def test_a_record_that_is_none_is_refused_with_its_fault(damage, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        decode_delta(damage(encode_delta(delta())))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ordinal": -1}, "does not fit"),
        ({"sample": 1 << 32}, "does not fit"),
        ({"logprobs": (-0.1,) * 4}, "not float32"),
        ({"logprobs": (-0.5,) * 3}, "4 tokens with 3 log-probabilities"),
    ],
)
def test_what_a_record_cannot_hold_exactly_is_refused(
    wrong: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        encode_delta(delta(**wrong))


# -- over a long run -----------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c") as group:
        yield group


def trajectory(ordinal: int, tokens: int) -> Trajectory:
    return Trajectory(
        ordinal=ordinal,
        sample=0,
        prompt=b"p",
        tokens=b"t" * tokens,
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
    held: list[Trajectory] = []
    seen, resident = [], []
    for ordinal in range(1200):
        whole = trajectory(ordinal, 64)
        for start in range(0, 64, 16):
            part = whole.tokens[start : start + 16]
            stamp = Stamp(generation=1, version=ordinal, count=16)
            piece = delta(part, ordinal=ordinal, sample=0, start=start, stamps=(stamp,))
            log.append([piece], held.copy)
        held.append(whole)
        if ordinal % 10 == 9:  # a step: the older half is trained and protected
            del held[:-20]
            log.release(held[0].ordinal)
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
    for each in held:
        assert found[each.key].tokens == each.tokens


def test_a_log_that_begins_anew_lets_go_of_what_it_repeats(
    group: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_log, "_REOPEN_S", 0.0)
    group.adopt()
    client = group.clients["a"]
    held = [trajectory(1, 8)]
    log = TokenLog(lambda: client, "w")
    log.append([], lambda: held)
    client.log_drop("w", node="a")  # given up by mistake: it lives
    log.append([delta()], lambda: held)  # refused: begins anew the next time
    for _ in range(3):
        log = TokenLog(lambda: client, "w")
        log.append([], lambda: held)
    records = client.log_read("w", node="a")
    assert [decode_delta(record).tokens for record in records] == [b"t" * 8]
