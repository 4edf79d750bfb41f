"""A script with an Accelerator that is killed in the middle ends as if it had not been."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate_plans import Launcher, Plan, launcher
from adapter_packages import needs

from holdfast import ckpt

pytestmark = needs("accelerate")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Launcher]:
    """Return the launcher of ranks."""
    with launcher() as found:
        yield found


def ends(found: list[Any]) -> list[Any]:
    return [{key: each[key] for key in ("step", "tokens", "lr", "hash", "steps")} for each in found]


def test_two_ranks_of_ddp_that_are_killed_end_in_the_bits_of_an_undisturbed_run(
    ranks: Launcher, tmp_path: Path
) -> None:
    whole, killed = Plan(root=tmp_path / "whole"), Plan(root=tmp_path / "killed")
    wanted = ranks.run(whole, ranks=2)
    assert [each["step"] for each in wanted] == [8, 8]
    assert ranks.run(replace(killed, die_at=3), ranks=2) == [None, None]
    found = ranks.run(killed, ranks=2)
    assert [each["begun_at"] for each in found] == [2, 2]
    for one, other in zip(found, wanted, strict=True):
        assert one["seen"] == other["seen"][-len(one["seen"]) :]
        assert len(one["seen"]) == 10
    assert ends(found) == ends(wanted)
    assert found[0]["steps"] == [6, 8], "keep=2"
    with ckpt.open(killed.root) as opened:
        assert {"model.0.weight", "optimizer.state.model.0.weight.exp_avg"} <= {*opened}


def test_two_ranks_of_fsdp2_that_are_killed_end_alike_and_one_process_goes_on_from_them(
    ranks: Launcher, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"is_split": True, "noisy": False}
    whole = Plan(root=tmp_path / "whole", sharded=True, **how)
    killed = Plan(root=tmp_path / "killed", sharded=True, **how)
    wanted = ranks.run(whole, ranks=2)
    ranks.run(replace(killed, die_at=5), ranks=2)
    one_process = Plan(root=tmp_path / "one", **how)
    shutil.copytree(killed.root, one_process.root)

    found = ranks.run(killed, ranks=2)
    assert [each["begun_at"] for each in found] == [4, 4]
    assert ends(found) == ends(wanted)

    (alone,) = ranks.run(one_process, ranks=1)
    left = len(alone["seen"])
    pairs = zip(wanted[0]["seen"], wanted[1]["seen"], strict=True)
    assert alone["seen"] == [one + other for one, other in pairs][-left:]
    assert (alone["begun_at"], left) == (4, 22)
    assert alone["weights"] == pytest.approx(wanted[0]["weights"], rel=1e-4, abs=1e-6)


@needs("accelerate", optional=True)
@pytest.mark.parametrize(
    ("how", "ranks_of_run"),
    [
        ({"seedable": True}, 2),
        ({"iterable": True}, 2),
        ({"fixed_buckets": True}, 3),
    ],
)
def test_other_orders_end_alike_too(
    how: dict[str, Any], ranks_of_run: int, ranks: Launcher, tmp_path: Path
) -> None:
    whole, killed = Plan(root=tmp_path / "whole", **how), Plan(root=tmp_path / "killed", **how)
    wanted = ranks.run(whole, ranks=ranks_of_run)
    ranks.run(replace(killed, die_at=3), ranks=ranks_of_run)
    found = ranks.run(killed, ranks=ranks_of_run)
    assert [each["begun_at"] for each in found] == [2] * ranks_of_run
    assert [each["seen"] for each in found] == [
        each["seen"][-len(found[0]["seen"]) :] for each in wanted
    ]
    assert ends(found) == ends(wanted)


@needs("accelerate", optional=True)
def test_three_ranks_go_on_from_two_with_the_rest_of_the_epoch(
    ranks: Launcher, tmp_path: Path
) -> None:
    killed = Plan(root=tmp_path / "killed", die_at=3)
    whole = ranks.run(replace(killed, root=tmp_path / "whole", die_at=None), ranks=2)
    ranks.run(killed, ranks=2)
    found = ranks.run(replace(killed, die_at=None), ranks=3)
    pairs = zip(whole[0]["seen"], whole[1]["seen"], strict=True)
    order = [number for one, other in pairs for number in one + other]
    rounds = zip(*(each["seen"] for each in found), strict=True)
    numbers = [number for each in rounds for batch in each for number in batch]
    left = order[32:52]  # of the first epoch, after four batches of each rank
    assert numbers[: len(left)] == left
