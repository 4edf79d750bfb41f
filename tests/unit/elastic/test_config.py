"""A wrong setting is refused at once, by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast.elastic.config import Batch, Mesh, Settings
from holdfast.elastic.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (Mesh, {"dp": 0}, "dp=0"),
        (Mesh, {"dp": "all"}, "dp='all'"),
        (Mesh, {"tp": 0}, "tp=0"),
        (Mesh, {"tp": ()}, "tp=()"),
        (Mesh, {"tp": (2, 2)}, "tp=(2, 2)"),
        (Mesh, {"shard": -1}, "shard=-1"),
        (Mesh, {"dp": 3, "shard": 2}, "dp is no multiple of shard"),
        (Mesh, {"ep": 0}, "ep=0"),
        (Mesh, {"dp": 3, "ep": 2}, "dp is no multiple of ep"),
        (Mesh, {"shard": 3, "ep": 2}, "give an ep that divides shard"),
        (
            Settings,
            {"mesh": Mesh(ep=(4, 2)), "batch": Batch(microbatches=6)},
            "Batch(microbatches=6) with Mesh(ep=(4, 2))",
        ),
        (
            Settings,
            {"exact": True, "mesh": Mesh(ep=(2, 1)), "batch": Batch(microbatches=6)},
            "exact=True with Mesh(ep=(2, 1))",
        ),
        (Settings, {"exact": True, "mesh": Mesh(tp=(2, 1))}, "give one size, or set exact=False"),
        (Mesh, {"min_dp": 0}, "min_dp=0"),
        (Mesh, {"dp": 2, "min_dp": 3}, "min_dp exceeds dp"),
        (Batch, {"microbatches": 0}, "microbatches=0"),
        (Batch, {"microbatches": 1, "size": 0}, "size=0"),
        (Settings, {"snapshot_every": 0}, "snapshot_every=0"),
        (Settings, {"parity": -1}, "parity=-1"),
        (Settings, {"parity": "mirror"}, "'replicate' for a whole copy"),
        (Settings, {"parity_group": 1}, "parity_group=1"),
        (Settings, {"parity": 8}, "give parity_group=9 or more"),
        (Settings, {"memory": "much"}, "memory='much': 'much' is not a size"),
        (Settings, {"memory": 0}, "memory=0"),
        (Settings, {"keep": 0}, "keep=0"),
        (Settings, {"checkpoint": ""}, "checkpoint=''"),
        (Settings, {"checkpoint_every": 0}, "checkpoint_every=0"),
        (Settings, {"checkpoint_bandwidth": "fast"}, "checkpoint_bandwidth: 'fast' is not a rate"),
        (Settings, {"on_checkpoint_error": "cry"}, "on_checkpoint_error='cry'"),
        (Settings, {"checkpoint_retries": -1}, "checkpoint_retries=-1"),
        (Settings, {"checkpoint_failures_allowed": -1}, "checkpoint_failures_allowed=-1"),
        (Settings, {"checkpoint_wait_s": -1}, "checkpoint_wait_s=-1"),
        (Settings, {"seed": -1}, "seed=-1"),
        (Settings, {"collective_timeout_s": 0}, "collective_timeout_s=0"),
    ],
)
def test_a_wrong_value_is_named(kind: Any, values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        kind(**values)


def test_the_job_spec_follows_from_the_mesh() -> None:
    assert Settings().job().dp is None
    assert Settings(mesh=Mesh(min_dp=2)).job().min_dp == 2
    fixed = Settings(mesh=Mesh(dp=3), parity=2, keep=4).job()
    assert (fixed.dp, fixed.min_dp, fixed.parity, fixed.keep) == (3, 3, 2, 4)


def test_the_axes_are_those_that_are_asked_for() -> None:
    assert Mesh().axes == ("dp",)
    assert Mesh(tp=(2, 1)).axes == ("dp", "tp")
    assert Mesh(shard=1).axes == ("replicate", "shard")
    assert Mesh(shard=(4, 2), tp=2).axes == ("replicate", "shard", "tp")
    assert Mesh(ep=2).axes == ("edp", "ep")
    assert Mesh(shard=4, ep=(2, 1), tp=2).axes == ("replicate", "edp", "ep", "tp")
    spread = Settings(mesh=Mesh(ep=(2, 1)), batch=Batch(microbatches=2)).job()
    assert (spread.ep, spread.least) == ((2, 1), 1)
    spec = Settings(mesh=Mesh(shard=(4, 2), tp=2)).job()
    assert (spec.shard, spec.tp, spec.least) == ((4, 2), (2,), 4)


def test_replicate_is_one_column_of_parity_one() -> None:
    spec = Settings(parity="replicate").job()
    assert (spec.parity, spec.columns) == (1, 1)
    spec = Settings(parity=2, parity_group=6, memory="12GiB").job()
    assert (spec.parity, spec.columns, spec.parity_group) == (2, 0, 6)
    assert spec.memory_bytes == 12 << 30
    assert Settings(memory=4096).job().memory_bytes == 4096
    assert Settings().job().memory_bytes == 0


def test_what_is_done_about_a_failing_store_reaches_the_sidecar() -> None:
    def target(**options: Any) -> tuple[int, int | None]:
        found = Settings(checkpoint="x", **options).target()
        assert found is not None
        return found.retries, found.failures_allowed

    assert target() == (3, 2)
    assert target(checkpoint_retries=1, checkpoint_failures_allowed=5) == (1, 5)
    assert target(on_checkpoint_error="skip") == (0, None)
    assert target(on_checkpoint_error="stop") == (0, 0)
    paced = Settings(checkpoint="x", checkpoint_bandwidth="500MB/s").target()
    assert paced is not None and paced.bytes_per_s == 500_000_000
