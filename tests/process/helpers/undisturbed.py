"""The result of the undisturbed small training, as the oracle for disturbed ones."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from forked_scripts import ran

WAITING = Path(__file__).with_name("waiting_training.py")


@functools.cache
def alone() -> list[str]:
    """Return the weights of the run that nothing disturbs; it runs once for all that ask."""
    with tempfile.TemporaryDirectory(prefix="holdfast-alone-") as directory:
        log, end = Path(directory, "log.jsonl"), Path(directory, "end")
        end.touch()
        env = {
            **os.environ,
            "HOLDFAST_TEST_LOG": str(log),
            "HOLDFAST_TEST_END": str(end),
            "OMP_NUM_THREADS": "1",
        }
        ran([sys.executable, WAITING], env=env, check=True)
        lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
        return weights(lines[-1])


def weights(line: dict[str, Any]) -> list[str]:
    assert line["done"] == 12
    return list(line["weights"])
