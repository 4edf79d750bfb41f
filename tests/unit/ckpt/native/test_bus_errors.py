"""Reads from the page cache outlive a file that is cut; other bus errors are not theirs."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from holdfast.ckpt.native import checked_read, crc, isal, streaming

SOURCE = Path(streaming.__file__).with_name("_stream.c")
ROWS, LEFT = 5, 3 * crc.BLOCK_BYTES + 100

CUTTING = """
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
int cuts;
static int stat_and_cut(int file, struct stat *found)
{
    char path[64];
    int failed = fstat(file, found);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    cuts += !truncate(path, LEFT);
    return failed;
}
#define fstat stat_and_cut
"""
"""Cuts a file after its size was looked at, before it is copied."""

pytestmark = pytest.mark.skipif(
    checked_read.pieces_kernel() is None or sys.platform != "linux", reason="not compiled"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(ROWS * crc.BLOCK_BYTES))
    with path.open("rb") as opened:
        try:
            os.preadv(opened.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError:
            pytest.skip("this file system does not say what the page cache has")
    return path


def test_a_file_that_is_cut_while_it_is_copied_is_read_up_to_its_end(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, made = tmp_path / "cutting.h", tmp_path / "cutting.so"
    header.write_text(CUTTING)
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
    build = [compiler, "-O1", "-shared", "-fPIC", f"-DLEFT={LEFT}", "-include", str(header)]
    subprocess.run([*build, "-o", str(made), str(SOURCE)], check=True)
    library, kept = ctypes.CDLL(str(made)), checked_read.pieces_kernel()
    cutting = library.checked_pieces
    cutting.argtypes, cutting.restype = kept.argtypes, kept.restype
    monkeypatch.setattr(checked_read, "pieces_kernel", lambda: cutting)

    data, rooms = file.read_bytes(), [bytearray(crc.BLOCK_BYTES) for _ in range(ROWS)]
    rows = [
        [n * crc.BLOCK_BYTES, crc.BLOCK_BYTES, isal.address_of(room), 0, crc.BLOCK_BYTES, 0, 0]
        for n, room in enumerate(rooms)
    ]
    with file.open("rb") as opened:
        sums, done, got = checked_read.read_pieces(opened.fileno(), np.array(rows, dtype=np.int64))
    assert ctypes.c_int.in_dll(library, "cuts").value == 1
    assert (done, got) == divmod(LEFT, crc.BLOCK_BYTES)
    blocks = [data[at : at + crc.BLOCK_BYTES] for at in range(0, LEFT, crc.BLOCK_BYTES)]
    assert list(map(bytes, rooms[:done])) == blocks[:done]
    assert sums[:done].tolist() == list(map(isal.crc32c, blocks[:done]))


READING = """
import faulthandler, mmap, os, signal, sys
import numpy as np
from holdfast.ckpt.native import checked_read, isal

def read():
    room = bytearray(9)
    with open(sys.argv[1], "rb") as file:
        row = [[0, 9, isal.address_of(room), 0, 9, 0, 0]]
        checked_read.read_pieces(file.fileno(), np.array(row, dtype=np.int64))

def touch_what_is_gone():
    with open(sys.argv[1], "r+b") as file:
        gone = mmap.mmap(file.fileno(), 0)
        file.truncate(0)
        gone[0]

"""


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("read(); os.kill(os.getpid(), signal.SIGBUS)", -signal.SIGBUS, ""),
        ("read(); touch_what_is_gone()", -signal.SIGBUS, ""),
        (
            "signal.signal(signal.SIGBUS, lambda *_: print('mine')); read(); read()\n"
            "os.kill(os.getpid(), signal.SIGBUS)",
            0,
            "mine",
        ),
        ("faulthandler.enable(); read(); touch_what_is_gone()", -signal.SIGBUS, "Bus error"),
        (
            "read(); faulthandler.enable(); read(); touch_what_is_gone()",
            -signal.SIGBUS,
            "Bus error",
        ),
        (
            "signal.signal(signal.SIGBUS, signal.SIG_IGN); read()\n"
            "os.kill(os.getpid(), signal.SIGBUS); print('alive')",
            0,
            "alive",
        ),
    ],
    ids=["sent", "touched", "handled", "told", "told later", "ignored"],
)
def test_other_bus_errors_do_what_they_did_before(
    file: Path, code: str, status: int, said: str
) -> None:
    command = [sys.executable, "-c", READING + code, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr
