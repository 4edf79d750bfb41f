"""A wrong setting is refused at once, by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast.ckpt.memory.target import CheckpointTarget, DiskTarget
from holdfast.elastic.config import Batch, Checkpoints, Mesh, Settings, Snapshots, Timeouts
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loss import LossGuard
from holdfast.elastic.membership.records import JobSpec
from holdfast.elastic.sea.settings import Islands


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
        (Settings, {"islands": Islands(), "mesh": Mesh(pp=2)}, "islands with Mesh(pp=2)"),
        (
            Settings,
            {"islands": Islands(), "mesh": Mesh(ep=(1, 2)), "batch": Batch(microbatches=2)},
            "islands with Mesh(ep=(1, 2))",
        ),
        (Settings, {"islands": Islands(), "mesh": Mesh(device="cuda")}, "Mesh(device='cuda')"),
        (
            Settings,
            {"islands": Islands(overlap=2), "loss_guard": LossGuard(steps_back=3)},
            "LossGuard(steps_back=3) with Islands(overlap=2): work is sent once",
        ),
        (
            Settings,
            {"mesh": Mesh(ep=(4, 2)), "batch": Batch(microbatches=6)},
            "Batch(microbatches=6) with Mesh(ep=(4, 2))",
        ),
        (
            Settings,
            {"exact": "float32", "mesh": Mesh(ep=(2, 1)), "batch": Batch(microbatches=6)},
            "exact='float32' with Mesh(ep=(2, 1))",
        ),
        (
            Settings,
            {"exact": "int64", "mesh": Mesh(tp=(2, 1))},
            "give one size, or set exact=None",
        ),
        (Mesh, {"min_dp": 0}, "min_dp=0"),
        (Mesh, {"dp": 2, "min_dp": 3}, "min_dp exceeds dp"),
        (Batch, {"microbatches": 0}, "microbatches=0"),
        (Batch, {"microbatches": 1, "size": 0}, "size=0"),
        (Snapshots, {"every": 0}, "Snapshots(every=0)"),
        (Snapshots, {"every": 1.5}, "Snapshots(every=1.5)"),
        (Snapshots, {"parity": -1}, "Snapshots(parity=-1)"),
        (Snapshots, {"parity": True}, "Snapshots(parity=True)"),
        (Snapshots, {"parity": "mirror"}, "'replicate' for a whole copy"),
        (Snapshots, {"group": 1}, "Snapshots(group=1)"),
        (Snapshots, {"parity": 8}, "give group=9 or more"),
        (Snapshots, {"memory": "much"}, "Snapshots(memory='much'): 'much' is not a size"),
        (Snapshots, {"memory": 0}, "Snapshots(memory=0)"),
        (Snapshots, {"keep": 0}, "Snapshots(keep=0)"),
        (Snapshots, {"disk": ""}, "Snapshots(disk='')"),
        (Snapshots, {"disk_every": 0}, "Snapshots(disk_every=0)"),
        (Checkpoints, {"root": ""}, "Checkpoints(root='')"),
        (Checkpoints, {"root": 3}, "Checkpoints(root=3)"),
        (Checkpoints, {"root": "x", "every": 0}, "Checkpoints(every=0)"),
        (
            Checkpoints,
            {"root": "x", "compression": "zstd"},
            "Checkpoints(compression='zstd'): give",
        ),
        (Checkpoints, {"root": "x", "compression": {"*": "rar"}}, "Checkpoints(compression=...)"),
        (Checkpoints, {"root": "x", "bandwidth": "fast"}, "'fast' is not a rate"),
        (Checkpoints, {"root": "x", "on_error": "cry"}, "Checkpoints(on_error='cry')"),
        (Checkpoints, {"root": "x", "retries": -1}, "Checkpoints(retries=-1)"),
        (Checkpoints, {"root": "x", "failures_allowed": -1}, "Checkpoints(failures_allowed=-1)"),
        (Checkpoints, {"root": "x", "wait_s": -1}, "Checkpoints(wait_s=-1)"),
        (Checkpoints, {"root": "x", "compression": {"*": 3}}, "compression has '*': 3"),
        (Checkpoints, {"root": "x", "compression": {3: "zstd"}}, "compression has 3: 'zstd'"),
        (Snapshots, {"memory": "9" * 400}, "is not a size"),
        (Timeouts, {"collective_s": 0}, "Timeouts(collective_s=0)"),
        (Timeouts, {"collective_s": float("inf")}, "give seconds above 0, at most 1e+09"),
        (LossGuard, {"factor": float("inf")}, "LossGuard(factor=inf): give a positive number"),
        (LossGuard, {"metric": ""}, "LossGuard(metric=''): give the name that run.log is called"),
        (Timeouts, {"stop_grace_s": 9}, "Timeouts(stop_grace_s=9): give 0 to 4"),
        (Settings, {"exact": 1}, "resilient(exact=1): give True for weights that do not depend"),
        (Settings, {"exact": False}, "or None for weights that depend on it in their last bits"),
        (Settings, {"exact": "float64"}, "resilient(exact='float64'): give True"),
        (Settings, {"seed": -1}, "seed=-1"),
        (Settings, {"rehearse": "no"}, "rehearse='no'"),
        (Settings, {"mesh": 2}, "resilient(mesh=2): give mesh=holdfast.Mesh(...)"),
        (Settings, {"batch": None}, "resilient(batch=None): give batch=holdfast.Batch(...)"),
        (Settings, {"snapshots": "12GiB"}, "snapshots='12GiB'): give snapshots=holdfast.Snapshots"),
        (Settings, {"checkpoint": 7}, "checkpoint=7): give checkpoint=holdfast.Checkpoints(...)"),
        (Settings, {"loss_guard": "skip"}, "give loss_guard=holdfast.LossGuard(...)"),
        (
            Settings,
            {"timeouts": 30},
            "resilient(timeouts=30): give timeouts=holdfast.Timeouts(...)",
        ),
    ],
)
def test_a_wrong_value_is_named(kind: Any, values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        kind(**values)


def test_the_job_spec_follows_from_the_mesh() -> None:
    assert Settings().job().dp is None
    assert Settings(mesh=Mesh(min_dp=2)).job().min_dp == 2
    fixed = Settings(mesh=Mesh(dp=3), snapshots=Snapshots(parity=2, keep=4)).job()
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
    def spec(**options: Any) -> JobSpec:
        return Settings(snapshots=Snapshots(**options)).job()

    assert (spec(parity="replicate").parity, spec(parity="replicate").columns) == (1, 1)
    found = spec(parity=2, group=6, memory="12GiB")
    assert (found.parity, found.columns, found.parity_group) == (2, 0, 6)
    assert found.memory_bytes == 12 << 30
    assert spec(memory=4096).memory_bytes == 4096
    assert spec().memory_bytes == 0


def test_what_is_done_about_a_failing_store_reaches_the_sidecar() -> None:
    def target(**options: Any) -> CheckpointTarget:
        found = Settings(
            checkpoint=Checkpoints("x", **options), timeouts=Timeouts(stop_grace_s=2)
        ).target()
        assert found is not None
        return found

    def failures(**options: Any) -> tuple[int, int | None]:
        found = target(**options)
        return found.retries, found.failures_allowed

    assert failures() == (3, 2)
    assert failures(retries=1, failures_allowed=5) == (1, 5)
    assert failures(on_error="skip") == (0, None)
    assert failures(on_error="stop") == (0, 0)
    assert target(bandwidth="500MB/s").bytes_per_s == 500_000_000
    assert (target().root, target().grace_s) == ("x", 2)
    assert Settings().target() is None


def test_the_disk_and_its_grace_reach_the_sidecar() -> None:
    settings = Settings(
        snapshots=Snapshots(disk="/d", disk_every=3), timeouts=Timeouts(stop_grace_s=1)
    )
    assert settings.disk_target() == DiskTarget(directory="/d", every=3, grace_s=1)
    assert Settings().disk_target() is None


def test_the_groups_are_frozen_and_take_keywords_only() -> None:
    with pytest.raises(TypeError):
        Snapshots(2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Checkpoints("x", 2)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Snapshots().keep = 3  # type: ignore[misc]


def test_a_launcher_overrides_single_values_of_a_group() -> None:
    script = Settings(
        snapshots=Snapshots(parity=1, keep=5), checkpoint=Checkpoints("runs/x", every=7)
    )
    found = script.overridden(
        {
            "snapshots": {"parity": "replicate", "memory": "1GiB", "disk": "/d"},
            "checkpoint": {"bandwidth": "1MB/s", "on_error": "skip"},
            "timeouts": {"stop_grace_s": 2.0},
            "rehearse": False,
        }
    )
    assert found == Settings(
        snapshots=Snapshots(parity="replicate", keep=5, memory="1GiB", disk="/d"),
        checkpoint=Checkpoints("runs/x", every=7, bandwidth="1MB/s", on_error="skip"),
        timeouts=Timeouts(stop_grace_s=2.0),
        rehearse=False,
    )
    assert script.overridden({}) == script


def test_an_override_may_name_the_stage() -> None:
    script = Settings(checkpoint=Checkpoints("runs/x"))
    overrides: dict[str, Any] = {"checkpoint": {"root": "/d/{stage}"}}
    found = script.overridden(overrides, stage="main.<locals>.tune")
    assert found.checkpoint == Checkpoints("/d/main-locals-tune")


@pytest.mark.parametrize(
    ("keep", "every", "steps_back", "kept"),
    [(1, 1, 0, 1), (1, 1, 1, 2), (1, 1, 3, 4), (1, 2, 3, 3), (5, 1, 1, 5)],
)
def test_as_many_steps_stay_in_memory_as_a_loss_guard_may_go_back(
    keep: int, every: int, steps_back: int, kept: int
) -> None:
    snapshots, guard = Snapshots(keep=keep, every=every), LossGuard(steps_back=steps_back)
    assert Settings(snapshots=snapshots, loss_guard=guard).job().keep == kept
    assert Settings(snapshots=snapshots).job().keep == keep


def test_an_island_has_a_snapshot_more_at_each_tide_and_holds_its_work_back() -> None:
    snapshots, guard, islands = Snapshots(every=2), LossGuard(steps_back=3), Islands()
    found = Settings(snapshots=snapshots, loss_guard=guard, islands=islands)
    assert (found.job().keep, found.held_steps) == (4, 3)
    found = Settings(loss_guard=guard, islands=islands)
    assert (found.job().keep, found.held_steps) == (4, 3)
    skips = Settings(loss_guard=LossGuard(nonfinite="skip", steps_back=9), islands=islands)
    assert skips.held_steps == 0


def test_a_launcher_names_an_island_and_its_meeting_place() -> None:
    overrides: dict[str, Any] = {"islands": {"name": "oslo", "meet": "/d/{stage}"}}
    found = Settings(islands=Islands(bits=8)).overridden(overrides, stage="tune")
    assert found.islands == Islands(name="oslo", meet="/d/tune", bits=8)
    found.check_named()
    with pytest.raises(ConfigError, match="the script is none: write"):
        Settings().overridden(overrides)
    Settings().check_named()


@pytest.mark.parametrize("missing", ["name", "meet"])
def test_an_island_without_a_name_or_a_place_is_refused(missing: str) -> None:
    values: dict[str, Any] = {"name": "oslo", "meet": "/d", missing: ""}
    with pytest.raises(ConfigError, match=rf"Islands\({missing}=''\): an island needs"):
        Settings(islands=Islands(**values)).check_named()


def test_islands_have_other_samples_and_one_seed_of_their_first_weights() -> None:
    alone, *islands = (
        Settings(seed=3, islands=islands)
        for islands in (None, Islands(name="a"), Islands(name="b"))
    )
    assert alone.own_seed == 3
    assert len({3, *(each.own_seed for each in islands)}) == 3
    assert {each.seed for each in islands} == {3}


def test_what_is_said_of_checkpoints_changes_nothing_where_there_are_none() -> None:
    assert Settings().overridden({"checkpoint": {"on_error": "skip"}}) == Settings()


def test_a_root_from_outside_gives_checkpoints_to_a_script_without_any() -> None:
    found = Settings().overridden({"checkpoint": {"root": "x/{stage}", "every": 5}}, stage="tune")
    assert found.checkpoint == Checkpoints("x/tune", every=5)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"disk": "/d"}, "overrides 'disk': only snapshots, checkpoint, timeouts, rehearse"),
        ({"seed": 3}, "overrides 'seed'"),
        ({"snapshots": {"parity_group": 3}}, "snapshots.parity_group: there is only every, parity"),
        ({"snapshots": 3}, "overrides snapshots by 3: give values by name"),
        ({"snapshots": {"keep": 0}}, "Snapshots(keep=0)"),
    ],
)
def test_a_wrong_override_is_named(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        Settings(loss_guard=LossGuard()).overridden(overrides)
