"""A record log against a list, under appends, truncation, cuts, torn writes and flips."""

from __future__ import annotations

import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.errors import CapacityError, CorruptError
from holdfast.ckpt.sidecar.logs import record_log
from holdfast.ckpt.sidecar.logs.frames import pack, parse
from holdfast.ckpt.sidecar.logs.record_log import RecordLog, load_logs
from holdfast.ckpt.sidecar.logs.segment import HEADER_BYTES


@contextmanager
def folder() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have logs of some kilobytes span several files and be compacted."""
    monkeypatch.setattr(record_log, "SEGMENT_BYTES", 4 * 4096)
    monkeypatch.setattr(record_log, "GRAIN_BYTES", 2 * 4096)


def contents(log: RecordLog) -> tuple[int, list[bytes | None]]:
    """Return base and records, read in small parts."""
    records: list[bytes | None] = []
    at = log.base
    while at < log.end:
        frames = log.frames(at, limit_bytes=1000)
        assert frames.first == at and frames.end > at
        records += [record for _, record in frames.records()]
        at = frames.end
    return log.base, records


def reopen(directory: Path) -> RecordLog:
    (log,) = load_logs(directory)
    return log


SIZES = st.lists(st.sampled_from([0, 1, 7, 60, 700, 5000, 20_000]), min_size=1, max_size=12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), SIZES),
        st.tuples(st.just("truncate"), st.integers(-3, 40)),
        st.tuples(st.just("reopen"), st.just(0)),
        st.tuples(st.just("tear"), st.integers(0, 300)),
        st.tuples(st.just("cut"), st.integers(0, 5)),
        st.tuples(st.just("copy"), SIZES),
    ),
    max_size=25,
)


@settings(max_examples=examples(60), deadline=None)
@given(steps=STEPS)
def test_a_log_is_a_list_that_survives_its_process(steps: list[tuple[str, object]]) -> None:
    with folder() as directory:
        log = RecordLog.create(directory, "tokens", node="a")
        base, model, made = 0, list[bytes](), 0
        for kind, what in steps:
            if kind in ("append", "copy"):
                assert isinstance(what, list)
                fresh = [(made + i).to_bytes(4, "little") * size for i, size in enumerate(what)]
                made += len(fresh)
                if kind == "append":
                    log.append(fresh)
                else:
                    log.append_frames(pack(fresh, log.end))
                model += fresh
            elif kind == "truncate":
                assert isinstance(what, int)
                keep_from = base + what
                log.truncate(keep_from)
                model = model[max(keep_from - base, 0) :]
                base = max(base, keep_from)
            elif kind == "cut":
                assert isinstance(what, int)
                index = max(base, base + len(model) - what)
                log.cut(index)
                model = model[: index - base]
            else:
                log.close()
                if kind == "tear":
                    tear(directory, what)
                log = reopen(directory)
            assert contents(log) == (base, model)
            assert log.bytes_from(log.base) == sum(16 + len(record) for record in model)
        log.close()


def tear(directory: Path, nbytes: object) -> None:
    """Leave the beginning of a record behind the last one, as a crash within an append does."""
    assert isinstance(nbytes, int)
    log = reopen(directory)
    last, end = log._segments[-1], log.end
    room = bytes(last._room.data)
    at = last._used
    with folder() as other:
        whole = RecordLog.create(other, "tokens", node="a", first=end)
        whole.append([b"never whole" * 30])
        text, _ = whole.raw(end)
        whole.close()
    log.close()
    torn = text[: min(nbytes, len(text) - 1, len(room) - at)]
    with last.path.open("r+b") as file:
        file.seek(at)
        file.write(torn)


def test_every_cut_of_the_file_recovers_a_prefix() -> None:
    records = [b"abc", b"", b"x" * 40, b"\0" * 20, b"last"]
    with folder() as directory:
        log = RecordLog.create(directory, "tokens", node="a")
        log.append(records)
        (path,) = directory.iterdir()
        log.close()
        whole = path.read_bytes()
        used = len(whole.rstrip(b"\0"))
        seen = set()
        for length in range(HEADER_BYTES, used + 2):
            path.write_bytes(whole[:length])
            again = reopen(directory)
            _, found = contents(again)
            assert found == records[: len(found)]
            seen.add(len(found))
            again.append([b"goes on"])
            assert contents(again) == (0, [*found, b"goes on"])
            again.close()
            for left in directory.iterdir():
                left.unlink()
        assert seen == set(range(len(records) + 1))


def test_every_flipped_byte_is_detected() -> None:
    records = [b"abc", b"x" * 40, b"", b"last"]
    with folder() as directory:
        log = RecordLog.create(directory, "tokens", node="a")
        log.append(records)
        (path,) = directory.iterdir()
        used = len(path.read_bytes().rstrip(b"\0"))
        data = log._segments[0]._room.data
        for at in range(HEADER_BYTES, used):
            data[at] ^= 0x40
            _, found = contents(log)  # while it lives
            assert sum(record is None for record in found) == 1
            assert all(record in (None, old) for record, old in zip(found, records, strict=True))
            log.close()
            log = reopen(directory)  # and after a crash
            _, after = contents(log)
            assert all(record in (None, old) for record, old in zip(after, records, strict=False))
            assert len(after) == len(records) or after == records[:-1]
            log.remove()
            log = RecordLog.create(directory, "tokens", node="a")
            log.append(records)
            data = log._segments[0]._room.data
        log.close()


@settings(max_examples=examples(200), deadline=None)
@given(
    records=st.lists(st.binary(max_size=40), max_size=6),
    edit=st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 400), st.integers(0, 7)),
        st.tuples(st.just("cut"), st.integers(0, 400), st.just(0)),
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(0, 255)),
        st.tuples(st.just("noise"), st.integers(0, 400), st.integers(0, 255)),
    ),
)
def test_frames_from_a_peer_are_what_was_sent_or_are_refused(
    records: list[bytes], edit: tuple[str, int, int]
) -> None:
    sent = bytes(pack(records, 5).data)
    kind, at, value = edit
    came = bytearray(sent)
    if kind == "flip" and came:
        came[at % len(came)] ^= 1 << value
    elif kind == "cut":
        del came[at:]
    elif kind == "add":
        came += bytes([value]) * at
    elif kind == "noise":
        came = bytearray([value]) * at
    try:
        found = parse(memoryview(came), 5, count=len(records), origin="peer")
    except CorruptError:
        assert came != sent
    else:
        assert came == sent
        assert [record for _, record in found.records()] == records


@pytest.mark.parametrize("length", [0, 10, 20, 100, HEADER_BYTES - 1])
def test_a_file_without_a_whole_header_is_removed(length: int) -> None:
    with folder() as directory:
        RecordLog.create(directory, "tokens", node="a").close()
        (path,) = directory.iterdir()
        path.write_bytes(path.read_bytes()[:length])
        assert load_logs(directory) == []
        assert list(directory.iterdir()) == []


def test_a_log_is_bounded_and_says_so() -> None:
    with folder() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_log, "MAX_LOG_BYTES", 10 * 4096)
        log = RecordLog.create(directory, "tokens", node="a")
        log.append([b"first"])
        with pytest.raises(CapacityError, match="truncate what has been consumed"):
            log.append([b"x" * 30_000] * 3)
        with pytest.raises(CapacityError, match="cut it into several"):
            log.append([bytes(record_log.MAX_RECORD_BYTES)])
        assert contents(log) == (0, [b"first"])
        log.append([b"second"])
        assert len(list(directory.iterdir())) == 1
        log.close()


def test_an_append_that_finds_no_memory_leaves_the_log_as_it_was() -> None:
    def full(_nbytes: int) -> None:
        raise CapacityError("full")

    with folder() as directory:
        log = RecordLog.create(directory, "tokens", node="a")
        log.append([b"first"])
        log._reserve = full
        with pytest.raises(CapacityError):
            log.append([b"x" * 3000] * 5)
        log.append([b"second"])
        log.truncate(1)
        assert contents(log) == (1, [b"second"])
        log.close()
        again = reopen(directory)
        assert contents(again) == (1, [b"second"])
        again.close()


def test_full_shared_memory_is_said_and_costs_nothing_that_was_appended() -> None:
    with folder() as directory:
        log = RecordLog.create(directory, "tokens", node="a")
        log.append([b"first"])
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 4096, before[1]))
        try:
            with pytest.raises(CapacityError, match="make room in shared memory"):
                log.append([b"x" * 3000] * 5)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        log.append([b"second"])
        assert contents(log) == (0, [b"first", b"second"])
        assert len(list(directory.iterdir())) == 1
        log.close()


def test_a_damaged_header_loses_its_file_and_no_other() -> None:
    with folder() as directory:
        log = RecordLog.create(directory, "tokens", node="a")
        records = [bytes([i]) * 3000 for i in range(12)]
        for record in records:
            log.append([record])
        files = [segment.path for segment in log._segments]
        assert len(files) > 2
        lost = range(log._segments[1].first, log._segments[1].end)
        log.close()
        with files[1].open("r+b") as file:
            file.seek(20)
            file.write(b"?")
        again = reopen(directory)
        wanted = [None if i in lost else record for i, record in enumerate(records)]
        assert contents(again) == (0, wanted)
        again.close()
