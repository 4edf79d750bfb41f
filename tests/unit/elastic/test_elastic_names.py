"""The public names of `elastic` are exactly these, documented, and cost no torch to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast import elastic

NAMES = [
    "Batch",
    "Checkpoints",
    "ConfigError",
    "CoordinatorError",
    "GenerationOverError",
    "Islands",
    "JobFailedError",
    "LeaseExpiredError",
    "Loader",
    "LossGuard",
    "Mesh",
    "Neighbors",
    "Nesterov",
    "Quorum",
    "Run",
    "Session",
    "Snapshots",
    "Stopped",
    "Timeouts",
    "UserEvent",
    "Weighted",
    "all_to_all",
    "declare_optimizer",
    "resilient",
    "session_of",
]


def test_the_names_are_frozen_and_documented() -> None:
    assert elastic.__all__ == NAMES
    assert all(getattr(elastic, name).__doc__ for name in NAMES)
    assert set(NAMES) <= set(dir(elastic))
    with pytest.raises(AttributeError, match="attribute resilent"):
        _ = elastic.resilent


def test_the_names_that_need_no_torch_do_not_import_it() -> None:
    script = (
        "import sys; from holdfast import elastic\n"
        "elastic.Mesh(); elastic.Batch(microbatches=2); elastic.GenerationOverError\n"
        "elastic.Snapshots(); elastic.Checkpoints('x'); elastic.Timeouts()\n"
        "import holdfast.elastic.data.sampler, holdfast.elastic.randomness\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
