"""What the small training comes to when nothing disturbs it: the oracle of disturbed ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

WAITING = Path(__file__).with_name("waiting_training.py")
_DEADLINE_S = 180.0


def alone(directory: Path) -> list[str]:
    """Return the weights of the run that nothing disturbs."""
    log = directory / "alone.jsonl"
    (directory / "alone.end").touch()
    env = {
        **os.environ,
        "HOLDFAST_TEST_LOG": str(log),
        "HOLDFAST_TEST_END": str(directory / "alone.end"),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([sys.executable, str(WAITING)], env=env, check=True, timeout=_DEADLINE_S)
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    return weights(lines[-1])


def weights(line: dict[str, Any]) -> list[str]:
    assert line["done"] == 12
    return list(line["weights"])
