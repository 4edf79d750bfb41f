"""The stacks of stuck processes that share an output file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.tools.chaos.real import stacks

STUCK = """
import faulthandler, time
faulthandler.enable()
def stuck(depth):
    if depth:
        stuck(depth - 1)
    else:
        print("here", flush=True)
        time.sleep(600)
stuck(90)
"""


def test_stacks_in_a_shared_file_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "spied", lambda pid: "")
    path = tmp_path / "output.log"
    with path.open("w") as output:
        argv = [sys.executable, "-c", STUCK]
        started = [
            subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=output, text=True)
            for _ in range(8)
        ]
    try:
        for each in started:
            assert each.stdout is not None
            assert each.stdout.readline() == "here\n"
        said = stacks.write_stacks([each.pid for each in started], tmp_path)
    finally:
        for each in started:
            each.kill()
            each.communicate()
    assert said == "the stacks are at the end of its processes' output"
    frames = (
        '  File "<string>", line 6 in stuck\n' * 90 + '  File "<string>", line 10 in <module>\n'
    )
    assert path.read_text().count(frames) == len(started)
