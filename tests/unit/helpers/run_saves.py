"""Checkpoints of runs, written and published as sidecars do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from doubles.checkpoints import shard, split_dim

from holdfast.ckpt.checkpoints.commit import WriterReceipt, commit, write_pack
from holdfast.ckpt.checkpoints.fence import RightToPublish


def written(root: str | Path, run: str, generation: int, step: int) -> WriterReceipt:
    """Write the one pack of a step, and publish nothing."""
    array = np.full((8,), float(generation), np.float32)
    index, payload = shard(
        {"w": (array, "float32")},
        {"w": split_dim((8,), parts=1)},
        writer=0,
        world_size=1,
        run=run,
        generation=generation,
        step=step,
    )
    return write_pack(root, step=step, index=index, payload=memoryview(payload))


def publish(
    root: str | Path, run: str, generation: int, step: int, *, acting: int | None = None
) -> None:
    """Save a step; ``acting`` is the generation that publishes, if it is a newer one."""
    commit(
        root,
        run=run,
        step=step,
        generation=generation,
        receipts=[written(root, run, generation, step)],
        mesh={},
        right=RightToPublish(run=run, generation=generation if acting is None else acting),
    )
