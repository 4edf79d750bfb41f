"""Save a step in a child that is killed at its Nth call to the system, for every N. No torch.

Usage: crash_driver.py ROOT old|none; prints a JSON line per N, the last with ``"finished": true``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.assemble import Assembler
from ckpt.catalog import committed_steps, open_store
from ckpt.source import StoreSource
from ckpt.testing.checkpoints import sample_arrays, write_checkpoint
from ckpt.verify import faults

CALLS = ("open", "writev", "fsync", "rename", "link", "unlink", "mkdir")
OLD, NEW = 0, 1


def die_at(number: int) -> None:
    """Replace the calls that change the disk by ones that count, and kill at ``number``.

    Odd numbers are killed before the call, even ones after it; writes in the middle.
    """
    count = 0

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                try:
                    if name == "writev":
                        part = memoryview(args[1][0]).cast("B")
                        os.write(args[0], part[: len(part) // 2])
                    elif number % 2 == 0:
                        real(*args, **options)
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def save(root: Path, seed: int) -> None:
    """Save with two writers that know no grid, so that there are merged cells too."""
    write_checkpoint(root, sample_arrays(seed), world_size=2, generation=seed, with_grids=False)


def content(root: Path) -> int | None:
    """Return which save a reader finds; fail on a mixture."""
    if committed_steps(root) != [1]:
        return None
    with StoreSource(root, 1) as source:
        assembler = Assembler(source)
        found = {fqn: assembler.box(fqn) for fqn in assembler.tensors}
    for seed in (OLD, NEW):
        wanted = sample_arrays(seed)
        if all(np.array_equal(found[fqn], array) for fqn, (array, _) in wanted.items()):
            return seed
    raise AssertionError("neither the old nor the new save")


def main() -> None:
    root, before = Path(sys.argv[1]), sys.argv[2]
    os.fsync = lambda _: None  # a killed process loses nothing that it has written
    for number in range(1, 10_000):
        place = root / str(number)
        if before == "old":
            save(place, OLD)
        child = os.fork()
        if child == 0:
            die_at(number)
            save(place, NEW)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        after_kill = content(place)
        save(place, NEW)
        damage = [fault.message for fault in faults(open_store(place), 1, deep=True)]
        rest = [path.name for path in place.rglob("*.tmp")]
        print(
            json.dumps(
                {
                    "number": number,
                    "status": status,
                    "found": after_kill,
                    "again": content(place),
                    "damage": damage,
                    "rest": rest,
                    "files": sum(path.is_file() for path in place.rglob("*")),
                    "finished": status == 0,
                }
            ),
            flush=True,
        )
        if status == 0:
            return


if __name__ == "__main__":
    main()
