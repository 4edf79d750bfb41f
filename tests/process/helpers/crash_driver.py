"""Save or prune in a child that is killed at its Nth system call, for every N. No torch.

Usage: crash_driver.py ROOT SCENE; prints a JSON line per N, the last with ``"finished": true``. The
scene ``random`` instead kills the processes of a save at random times, fifty times.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # `doubles`, when this file runs as a program

import msgspec
import numpy as np
from doubles.checkpoints import (
    Array,
    sample_arrays,
    shard,
    split_dim,
    write_checkpoint,
)
from doubles.pruning import prune

from holdfast.ckpt.checkpoints import commit
from holdfast.ckpt.checkpoints.assemble import Assembler
from holdfast.ckpt.checkpoints.catalog import committed_steps, load_manifest, step_folder
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.format.manifest import MANIFEST, REFS, RETAINED
from holdfast.ckpt.store.local import LocalStore

CALLS = ("open", "writev", "fsync", "rename", "link", "unlink", "mkdir", "rmdir")
OLD, NEW = 0, 1

Arrays = dict[str, tuple[Array, str]]


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


def arrays(seed: int) -> Arrays:
    """Return a state of which a part never changes."""
    return sample_arrays(seed) | {"frozen": (np.arange(3000, dtype="<i4"), "int32")}


def save(
    root: Path,
    step: int,
    seed: int,
    *,
    generation: int = 1,
    base: int | None = None,
    register_from: int = commit.MANY_WRITERS,
) -> None:
    """Save with two writers that know no grid, so that there are merged cells too."""
    write_checkpoint(
        root,
        arrays(seed),
        world_size=2,
        step=step,
        generation=generation,
        base=base,
        with_grids=False,
        register_from=register_from,
    )


def old_and_base(root: Path) -> None:
    save(root, 1, OLD)
    save(root, 2, OLD, base=1)


Action = Callable[[Path], object]
SCENES: Mapping[str, tuple[Action, Action]] = {
    "first": (lambda _: None, lambda root: save(root, 1, NEW)),
    "again": (lambda root: save(root, 1, OLD), lambda root: save(root, 1, NEW)),
    "newer generation": (
        lambda root: save(root, 1, OLD),
        lambda root: save(root, 1, NEW, generation=2),
    ),
    "with a register": (
        lambda root: save(root, 1, OLD),
        lambda root: save(root, 1, NEW, register_from=2),
    ),
    "with a base": (old_and_base, lambda root: save(root, 3, NEW, base=2)),
    "over a base": (old_and_base, lambda root: save(root, 1, NEW)),
    "prune": (old_and_base, lambda root: prune(root, keep_last=1)),
}
"""Name → the preparation, and the work that is killed."""


def content(root: Path) -> dict[str, int]:
    """Return which save a reader finds at each step; fail on a mixture."""
    return {str(step): seed_of(root, step) for step in committed_steps(root)}


def seed_of(root: Path, step: int) -> int:
    with StoreSource(root, step) as source:
        assembler = Assembler(source)
        found = {fqn: assembler.box(fqn) for fqn in assembler.tensors}
    for seed in (OLD, NEW):
        if all(np.array_equal(found[fqn], array) for fqn, (array, _) in arrays(seed).items()):
            return seed
    raise AssertionError("neither the old nor the new save")


def leftovers(root: Path) -> list[str]:
    """Return the files that no step needs; notes beside packs that one needs are none."""
    store = LocalStore(root)
    needed = set()
    for step in committed_steps(root):
        folder = step_folder(step)
        manifest = load_manifest(store, folder)
        needed |= {f"{folder}/{MANIFEST}", *(f"{folder}/{f.path}" for f in manifest.files())}
        needed |= {path.removeprefix("../") for path in manifest.bases()}
    needed |= {f"{name.partition('/')[0]}/{RETAINED}" for name in needed}
    there = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return sorted(there - needed)


def damage(root: Path) -> list[str]:
    """Return the files a deep check of all steps complains of."""
    store = LocalStore(root)
    return [f.file for step in committed_steps(root) for f in faults(store, step, deep=True)]


def kill_at_every_call(root: Path, scene: str) -> None:
    prepare, action = SCENES[scene]
    for number in range(1, 10_000):
        place = root / str(number)
        prepare(place)
        child = os.fork()
        if child == 0:
            die_at(number)
            action(place)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found, hurt = content(place), [name for name in damage(place) if not name.endswith(REFS)]
        action(place)
        report = {
            "status": status,
            "found": found,
            "again": content(place),
            "damage": hurt + damage(place),
            "rest": leftovers(place),
            "finished": status == 0,
        }
        print(json.dumps({"number": number} | report), flush=True)
        if status == 0:
            return


def kill_at_random(root: Path) -> None:
    """Save with three processes, all killed at some moment; a real save goes between."""
    rng = random.Random(0)
    save(root, 1, OLD)
    started = time.monotonic()
    save_in_processes(root, NEW)
    whole_s = time.monotonic() - started
    save(root, 1, OLD)
    for number in range(50):
        group = os.fork()
        if group == 0:
            os.setpgid(0, 0)
            save_in_processes(root, NEW)
            os._exit(0)
        time.sleep(rng.uniform(0, 1.2 * whole_s))
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(group, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(group, 0)[1])
        found = content(root)
        hurt = [name for name in damage(root) if not name.endswith(REFS)]
        if found == {"1": NEW} or number % 10 == 9:
            save(root, 1, OLD)
        line = {"number": number, "status": status, "found": found, "damage": hurt}
        print(json.dumps(line), flush=True)
    save(root, 1, OLD)
    print(json.dumps({"finished": True, "damage": damage(root), "again": content(root)}))


def save_in_processes(root: Path, seed: int) -> None:
    """Save step 1 by two writers in processes of their own, and a committer."""
    state = arrays(seed)
    boxes = {fqn: split_dim(array.shape, parts=2) for fqn, (array, _) in state.items()}
    writers = []
    for writer in range(2):
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            index, payload = shard(state, boxes, writer=writer, world_size=2)
            receipt = commit.write_pack(root, step=1, index=index, payload=memoryview(payload))
            os.write(write, msgspec.json.encode(receipt))
            os._exit(0)
        os.close(write)
        writers.append((child, read))
    receipts = []
    for child, read in writers:
        with os.fdopen(read, "rb") as pipe:
            receipts.append(msgspec.json.decode(pipe.read(), type=commit.WriterReceipt))
        os.waitpid(child, 0)
    commit.commit(root, run="test", step=1, generation=1, receipts=receipts, mesh={"dp": 2})


def _nothing(fd: object) -> None:
    """Stand for fsync: a killed process loses nothing that it has written."""


def main() -> None:
    root, scene = Path(sys.argv[1]), sys.argv[2]
    os.fsync = _nothing
    if scene == "random":
        kill_at_random(root)
    else:
        kill_at_every_call(root, scene)


if __name__ == "__main__":
    main()
