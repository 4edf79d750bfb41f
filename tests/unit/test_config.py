"""A wrong setting is refused at once, by name."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.config import Batch, Mesh, Settings
from elastic.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (Mesh, {"dp": 0}, "dp=0"),
        (Mesh, {"dp": "all"}, "dp='all'"),
        (Mesh, {"tp": 2}, "tp=2"),
        (Mesh, {"min_dp": 0}, "min_dp=0"),
        (Mesh, {"dp": 2, "min_dp": 3}, "min_dp exceeds dp"),
        (Batch, {"microbatches": 0}, "microbatches=0"),
        (Batch, {"microbatches": 1, "size": 0}, "size=0"),
        (Settings, {"snapshot_every": 0}, "snapshot_every=0"),
        (Settings, {"parity": -1}, "parity=-1"),
        (Settings, {"keep": 0}, "keep=0"),
        (Settings, {"checkpoint": ""}, "checkpoint=''"),
        (Settings, {"checkpoint_every": 0}, "checkpoint_every=0"),
        (Settings, {"seed": -1}, "seed=-1"),
        (Settings, {"collective_timeout_s": 0}, "collective_timeout_s=0"),
    ],
)
def test_a_wrong_value_is_named(kind: Any, values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace("(", r"\(")):
        kind(**values)


def test_the_job_spec_follows_from_the_mesh() -> None:
    assert Settings().job().dp is None
    assert Settings(mesh=Mesh(min_dp=2)).job().min_dp == 2
    fixed = Settings(mesh=Mesh(dp=3), parity=2, keep=4).job()
    assert (fixed.dp, fixed.min_dp, fixed.parity, fixed.keep) == (3, 3, 2, 4)
