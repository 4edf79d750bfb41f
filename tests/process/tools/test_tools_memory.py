"""The commands that read whole checkpoints keep to their memory limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from doubles.checkpoints import write_checkpoint

STATE_BYTES = 192 << 20
MEMORY_BYTES = 48 << 20
SLACK_BYTES = 24 << 20
"""The allocator's, the threads' stacks, and the output's."""


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints that hold the same in different layouts, but for one element."""
    place = tmp_path_factory.mktemp("large")
    array = np.arange(STATE_BYTES // 4, dtype="<f4").reshape(-1, 4096)
    write_checkpoint(place / "a", {"w": (array, "float32")}, world_size=2)
    array[-1, -1] += 1024
    write_checkpoint(place / "b", {"w": (array, "float32")}, world_size=3)
    return place / "a", place / "b"


def growth(*words: str | Path) -> tuple[int, str]:
    """Return by how much the peak grows over that of a run that reads next to nothing."""
    program = (
        "import resource, sys\n"
        "from holdfast.tools.cli import main\n"
        "main(['cat', sys.argv[1], 'w[0, 0]'])\n"
        "main(['verify', sys.argv[1]]); main(['diff', sys.argv[1], sys.argv[1], '--keys'])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "code = main(sys.argv[2:])\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print('grew', (after - before) * 1024, code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(words[1]), *map(str, words)],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    return int(done.stdout.split("grew ")[1].split()[0]), done.stdout


def test_a_difference_is_found_in_bounded_memory(roots: tuple[Path, Path]) -> None:
    grew, said = growth("diff", *roots, "--memory", str(MEMORY_BYTES))
    rows = STATE_BYTES // 4 // 4096
    assert f"at [{rows - 1}, 4095]" in said
    assert grew <= MEMORY_BYTES + SLACK_BYTES


def test_statistics_are_made_in_bounded_memory(roots: tuple[Path, Path]) -> None:
    grew, said = growth("cat", roots[0], "w", "--stats", "--memory", str(MEMORY_BYTES))
    assert f"{STATE_BYTES // 4:,}" in said
    assert grew <= MEMORY_BYTES + SLACK_BYTES


def test_a_deep_check_takes_a_buffer_per_thread(roots: tuple[Path, Path]) -> None:
    grew, said = growth("verify", roots[0], "--deep", "--threads", "4")
    assert "every byte checked" in said
    assert grew <= SLACK_BYTES
