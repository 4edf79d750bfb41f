"""Faults of disks and clocks, for some processes only."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_victims import Remote, Site, struck
from doubles.blocks import make_world, random_payload

from holdfast.ckpt.memory.arena import Arena
from holdfast.ckpt.sidecar.disk.directory import SpillDirectory, SpilledHoldings
from holdfast.ckpt.testing.shards import make_index
from holdfast.elastic.events import StepDone, encode
from holdfast.tools.chaos.faults.environment import together
from holdfast.tools.chaos.faults.injector import Victim
from holdfast.tools.chaos.faults.preloaded.clock import ClockInjector
from holdfast.tools.chaos.faults.preloaded.disk import DiskInjector

OPEN = "os.open({!r}, os.O_RDWR | os.O_CREAT)"


class Two:
    """A process that is hurt and one that is not, both below the library and its rules."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site = folder / "run", Site(folder / "run")
        self.folder.mkdir()
        self.disk, self.clock = DiskInjector(), ClockInjector()
        env = together(self.disk.prepare(self.site, ()), self.clock.prepare(self.site, ()))
        self.hurt, self.well = Remote(env), Remote(env)
        self.victim: Victim = self.site.add("worker/0", self.hurt.pid)

    def close(self) -> None:
        self.hurt.close()
        self.well.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    found = Two(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("kind", "message", "lines"),
    [
        (
            "disk-full",
            "ENOSPC",
            [
                "os.write(fd, b'more')",
                "os.pwrite(fd, b'more', 0)",
                "os.writev(fd, [b'more'])",
                "os.posix_fallocate(fd, 0, 1000)",
                "os.close(os.open('new', os.O_CREAT))",
                "os.mkdir('folder')",
            ],
        ),
        (
            "disk-error",
            "EIO",
            ["os.fsync(fd)", "os.pread(fd, 4, 0).decode()", "os.write(fd, b'more')"],
        ),
        (
            "disk-write-error",
            "EIO",
            ["os.fsync(fd)", "os.truncate(fd, 2)", "os.write(fd, b'more')"],
        ),
        (
            "disk-readonly",
            "EROFS",
            [
                "os.close(os.open('file', os.O_RDWR))",
                "os.truncate(fd, 2)",
                "os.rename('file', 'other')",
                "os.unlink('other')",
            ],
        ),
    ],
)
def test_calls_fail_as_on_such_a_disk(two: Two, kind: str, message: str, lines: list[str]) -> None:
    two.hurt.does(f"!os.chdir({str(two.folder)!r}); fd = os.open('file', os.O_RDWR | os.O_CREAT)")
    two.hurt.does("!os.write(fd, b'some')")
    undo = two.disk.strike(struck(kind, lasts_s=60), two.victim, two.site)
    assert undo is not None
    assert [two.hurt.does(line) for line in lines] == [message] * len(lines)
    assert (two.folder / "file").read_bytes() == b"some"
    undo()
    assert message not in [two.hurt.does(line) for line in lines]


def test_a_disk_that_fails_to_write_can_be_read(two: Two) -> None:
    two.hurt.does(f"!fd = os.open({str(two.folder / 'file')!r}, os.O_RDWR | os.O_CREAT)")
    two.hurt.does("!os.write(fd, b'some')")
    two.disk.strike(struck("disk-write-error"), two.victim, two.site)
    assert two.hurt.does("os.write(fd, b'more')") == "EIO"
    assert two.hurt.does("os.pread(fd, 4, 0).decode()") == "some"


READ_SPILLED = """
from pathlib import Path
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.sidecar.disk.directory import SpillDirectory

def read(folder):
    spilled = SpillDirectory(Path(folder))
    try:
        for found in known:
            spilled.open(found, found.blocks[0]).close()
        return "read"
    except CorruptError as error:
        return str(error)

known = SpillDirectory(Path({folder!r})).snapshots()
"""


def test_a_spilled_snapshot_that_the_disk_does_not_return_is_refused(two: Two) -> None:
    folder, payload = two.folder / "disk", random_payload(3000, seed=(1,))
    slot = Arena.open(two.folder / "arena", run="test").create(8000)
    slot.block(3000)[:] = payload
    entry = slot.finish(make_index(payload, run="test", generation=1, step=1, rank=0, world_size=1))
    holdings = SpilledHoldings(
        world=make_world({"a": "x"}, rank_nodes=("a",)),
        step=1,
        blocks={0: (slot, entry)},
        rows=[],
        sealed=[entry],
    )
    SpillDirectory(folder).write(holdings, pace=lambda nbytes: None)
    two.hurt.does(f"!exec({READ_SPILLED.format(folder=str(folder))!r})")
    assert two.hurt.does(f"read({str(folder)!r})") == "read"
    two.disk.strike(struck("disk-error"), two.victim, two.site)
    said = two.hurt.does(f"read({str(folder)!r})")
    assert "cannot be read ([Errno 5] Input/output error); use another copy" in said


def test_others_other_folders_and_what_tells_are_left_alone(two: Two, tmp_path: Path) -> None:
    two.disk.strike(struck("disk-full"), two.victim, two.site)
    inside = str(two.folder / "new")
    assert two.hurt.does(OPEN.format(inside)) == "ENOSPC"
    assert two.hurt.does(OPEN.format(str(two.folder / "history.jsonl"))) > 2
    assert two.hurt.does(OPEN.format(str(tmp_path / "outside"))) > 2
    assert two.well.does(OPEN.format(inside)) > 2
    assert two.hurt.does("os.stat('/').st_ino") > 0
    for remote, status in ((two.hurt, 1), (two.well, 0)):
        file = str(two.folder / f"of the child of {remote.pid}")
        words = f"[sys.executable, '-c', 'open({json.dumps(file)}, \"w\")']"
        ran = f"__import__('subprocess').run({words}, capture_output=True)"
        assert remote.does(f"{ran}.returncode") == status


def test_a_slow_disk_takes_its_time(two: Two) -> None:
    two.hurt.does(f"!fd = {OPEN.format(str(two.folder / 'file'))}")
    two.disk.strike(struck("disk-slow", amount=0.2), two.victim, two.site)
    start_s = time.monotonic()
    assert two.hurt.does("os.write(fd, b'some')") == 4
    assert time.monotonic() - start_s >= 0.2


def test_a_torn_write_arrives_in_part_and_nothing_behind_it(two: Two) -> None:
    file = two.folder / "file"
    two.hurt.does(f"!fd = {OPEN.format(str(file))}")
    two.disk.strike(struck("disk-torn", amount=0.25), two.victim, two.site)
    two.hurt.begins("os.write(fd, b'0123456789abcdef'), os.write(fd, b'more')")
    assert two.hurt.process.wait(60) == -signal.SIGKILL
    assert file.read_bytes() == b"0123"


def test_a_clock_jumps_and_drifts_and_comes_back(two: Two) -> None:
    def ahead_s() -> float:
        return float(two.hurt.does("time.time()")) - time.time()

    assert abs(ahead_s()) < 60
    undo = two.clock.strike(struck("clock-jump", amount=-7200, lasts_s=60), two.victim, two.site)
    assert undo is not None
    assert -7260 < ahead_s() < -7140
    assert abs(two.hurt.does("time.monotonic()") - time.monotonic()) < 60
    assert abs(two.well.does("time.time()") - time.time()) < 60
    assert two.hurt.does("__import__('datetime').datetime.now().timestamp()") < time.time() - 7140
    hook = b'{"t":12345.5,"kind":"step","step":1,"rank":0}'
    lines = {"t": hook, "time_s": encode(StepDone(step=1, rank=0, node="a", time_s=12345.5))}
    file = two.folder / "history-1.jsonl"
    for remote, line in itertools.product((two.hurt, two.well), lines.values()):
        whole = line + b"\n"
        wrong = f"{whole!r}.replace(b'12345.5', repr(time.time()).encode())"
        wrote = f"os.write(os.open({str(file)!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT), {wrong})"
        assert remote.does(wrote) > 0
    for name, each in zip([*lines] * 2, file.read_text().splitlines(), strict=True):
        event = json.loads(each)
        assert abs(event[name] - time.time()) < 60
        assert event["rank"] == 0
    undo()
    assert abs(ahead_s()) < 60
    two.clock.strike(struck("clock-skew", amount=1e5), two.victim, two.site)
    time.sleep(0.01)
    assert ahead_s() > 1e3 - 60
