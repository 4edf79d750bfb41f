"""Write the stored sample of this format version; run once per released version.

Usage: python tests/format/make_sample.py tests/format/v3

Version 3 is version 2 with a register, as a step of many writers has it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # `doubles`, when this file runs as a program

import numpy as np
from doubles.checkpoints import Array, sample_arrays, split_dim, write_checkpoint
from doubles.pruning import remove

from holdfast.ckpt.checkpoints.commit import MANY_WRITERS
from holdfast.ckpt.geometry.layout import Box

WRITTEN_AT = Path("/tmp/holdfast-sample")
"""The sample is moved afterwards: its reference map shall name no machine."""

VALUES = {"optimizer.groups.0.lr": 0.1, "cursor": {"$tuple": [1, 2]}}
ALIASES = {"model.tied": "model.weight"}
WORLD_SIZE = 3

Arrays = dict[str, tuple[Array, str]]


def arrays_of(version: int) -> Arrays:
    """Return what the sample of a version holds."""
    if version == 1:
        return sample_arrays()
    rng = np.random.default_rng(2)
    return sample_arrays() | {
        "model.columns": (rng.integers(0, 1 << 16, (4, 10)).astype("<u2"), "bfloat16"),
        "model.frozen": (np.arange(120, dtype="<f4").reshape(12, 10), "float32"),
        "model.scales": (rng.integers(0, 256, (11,)).astype("|u1"), "float8_e5m2"),
        "model.shuffled": (np.arange(300, dtype="<i8").reshape(30, 10), "int64"),
        "model.squeezed": (np.repeat(np.arange(6, dtype="<i2"), 50).reshape(6, 50), "int16"),
        "optimizer.flat": (rng.standard_normal(11).astype("<f8"), "float64"),
    }


def main() -> None:
    """Save step 40, step 42 with 40 as base, and remove 40 except for the packs 42 needs."""
    arrays = arrays_of(2)
    boxes = {fqn: split_dim(a.shape, parts=WORLD_SIZE) for fqn, (a, _) in arrays.items()}
    boxes["model.columns"] = split_dim((4, 10), parts=WORLD_SIZE, dim=1)
    boxes["optimizer.flat"] = [Box(offset=(at,), shape=(n,)) for at, n in [(0, 2), (2, 1), (3, 8)]]
    older = {
        fqn: (array if fqn == "model.frozen" or not array.ndim else array[::-1], dtype)
        for fqn, (array, dtype) in arrays.items()
    }
    for step, state in ((40, older), (42, arrays)):
        write_checkpoint(
            WRITTEN_AT,
            state,
            boxes=boxes,
            world_size=WORLD_SIZE,
            run="sample",
            step=step,
            generation=5,
            values=VALUES,
            aliases=ALIASES,
            base=40 if step == 42 else None,
            compression={"model.squeezed": "zstd:3", "model.shuffled": "blosc-lz4:5"},
            register_from=2 if sys.argv[1].endswith("v3") else MANY_WRITERS,
        )
    remove(WRITTEN_AT, 40)
    shutil.move(WRITTEN_AT, sys.argv[1])


if __name__ == "__main__":
    main()
