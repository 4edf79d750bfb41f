"""Jobs of three nodes that are hurt on their way, and the tensors with which they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jobs import Job, launched, trainers

NODES = ("n0", "n1", "n2")


def finished(
    folder: Path,
    script: str,
    *args: object,
    hurts: Callable[[Job], None] | None = None,
) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the tensors that a job of three nodes saves at its end, and its events.

    The script gets the file to save them to, then ``args``. ``hurts`` may kill what it likes while
    the job runs.
    """
    folder.mkdir()
    file, result = folder / "train.py", folder / "result.pt"
    file.write_text(script)
    config = trainers(file, (result, *args), run_dir=folder / "run", nodes=len(NODES))
    with launched(config) as running:
        if hurts is not None:
            hurts(running)
        outcome = running.finish()
        assert outcome.ok, outcome.message
        events = list(running.history)
    return torch.load(result), events


def lose_in_turn(running: Job, losses: Sequence[tuple[int, str]]) -> None:
    """Lose machines at steps of the job, each once the generation after the one before is there."""
    for step, node in losses:
        running.await_step(step)
        next_one = len(running.events("proposed")) + 1
        assert running.launcher.lose_machine(node)
        running.generation(next_one)
