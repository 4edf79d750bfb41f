"""Write the stored sample of this format version; run once per released version.

Usage: python tests/format/make_sample.py tests/format/v1
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from ckpt.testing.checkpoints import sample_arrays, write_checkpoint

WRITTEN_AT = Path("/tmp/holdfast-sample")
"""The sample is moved afterwards: its reference map shall name no machine."""


def main() -> None:
    write_checkpoint(
        WRITTEN_AT,
        sample_arrays(),
        world_size=3,
        run="sample",
        step=42,
        generation=5,
        values={"optimizer.groups.0.lr": 0.1, "cursor": {"$tuple": [1, 2]}},
        aliases={"model.tied": "model.weight"},
    )
    shutil.move(WRITTEN_AT, sys.argv[1])


if __name__ == "__main__":
    main()
