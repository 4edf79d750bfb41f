"""Rewrite a checkpoint in a child that is killed at its Nth system call. No torch.

Usage: rewrite_driver.py ROOT reshard|safetensors; prints a JSON line per N, the last with
``"status": 0``. After each kill it checks the visible files, then repeats the work.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path

from crash_driver import die_at
from doubles.checkpoints import sample_arrays, write_checkpoint
from doubles.interchange import read_all
from doubles.pruning import prune

from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.convert.checkpoint import CheckpointSource
from holdfast.ckpt.convert.interchange import Transferred, transfer
from holdfast.ckpt.convert.rewrite import reshard
from holdfast.ckpt.convert.safetensors import SafetensorsSink, SafetensorsSource
from holdfast.ckpt.convert.target_layout import TargetLayout
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.store.places import open_store

STEP_OF_CALLS = 3
"""Of the places to be killed at, every third is tried; the parity of the number changes."""


def rewrite(how: str, source: Path, target: Path) -> Transferred:
    """Do the work."""
    with StoreSource(source, 1) as opened:
        if how == "reshard":
            return reshard(opened, target, layout=TargetLayout(mesh={"dp": 3}))
        tensors = CheckpointSource(opened)
        with SafetensorsSink(target, file_bytes=150, content=tensors.identity.content) as sink:
            return transfer(tensors, sink)


def visible(how: str, target: Path) -> bool:
    """Return whether the result is visible; fail if it is visible and wrong."""
    wanted = {fqn: array.tobytes() for fqn, (array, _) in sample_arrays().items()}
    if how == "reshard":
        if committed_steps(target) != [1]:
            return False
        assert not list(faults(open_store(target), 1, deep=True))
        with StoreSource(target, 1) as opened:
            assert read_all(CheckpointSource(opened)) == wanted
        return True
    if not (target / "model.safetensors.index.json").exists():
        return False
    with closing(SafetensorsSource(target)) as found:
        assert read_all(found) == wanted
    return True


def again(how: str, source: Path, target: Path) -> int | str:
    """Do the work again; return the bytes it took, or why it was refused."""
    try:
        return rewrite(how, source, target).bytes
    except CkptError as error:
        return str(error)


def pruned(how: str, target: Path) -> bool:
    """Remove what a killed writer of a published step left, as any prune does."""
    return how != "reshard" or prune(target, keep_last=1) == []


def main() -> None:
    root, how = Path(sys.argv[1]), sys.argv[2]
    os.fsync = lambda _: None  # a killed process loses nothing that it has written
    source = root / "source"
    write_checkpoint(source, sample_arrays(), world_size=2)
    for number in range(1, 10_000, STEP_OF_CALLS):
        target = root / str(number)
        child = os.fork()
        if child == 0:
            die_at(number)
            rewrite(how, source, target)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        seen = visible(how, target)
        line = {
            "status": status,
            "visible": seen,
            "again": again(how, source, target),
            "after": visible(how, target) and pruned(how, target),
            "rest": [path.name for path in target.rglob("*.tmp")],
        }
        print(json.dumps(line), flush=True)
        if status == 0:
            return


if __name__ == "__main__":
    main()
