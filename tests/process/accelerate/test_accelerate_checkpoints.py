"""A script with an Accelerator that is killed in the middle ends as if it had not been."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from adapter_packages import needs
from ports import free_ports

from holdfast import ckpt

pytestmark = needs("accelerate")

DEADLINE_S = 240.0

Launch = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    """Return a function that runs the ranks of a plan and returns what they sent."""
    import accelerate_bodies

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["accelerate_bodies"])

    def run(plan: Any, *, ranks: int) -> list[Any]:
        port, pipes, processes = free_ports(1)[0], [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=accelerate_bodies.rank_main, args=(rank, ranks, port, plan, theirs)
            )
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            found = [_received(pipe) for pipe in pipes]
            for process in processes:
                process.join(DEADLINE_S)
            wanted = 0 if plan.die_at is None else -signal.SIGKILL
            assert [each.exitcode for each in processes] == [wanted] * ranks, found
            return found
        finally:
            for process in processes:
                process.kill()

    yield run
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _received(pipe: Any) -> Any:
    assert pipe.poll(DEADLINE_S), "a rank said nothing"
    try:
        return pipe.recv()
    except EOFError:  # it was killed
        return None


def plan_of(root: Path, **how: Any) -> Any:
    from accelerate_bodies import Plan

    return Plan(root=root, **how)


def ends(found: list[Any]) -> list[Any]:
    return [{key: each[key] for key in ("step", "tokens", "lr", "hash", "steps")} for each in found]


def test_two_ranks_of_ddp_that_are_killed_end_in_the_bits_of_an_undisturbed_run(
    launch: Launch, tmp_path: Path
) -> None:
    whole, killed = plan_of(tmp_path / "whole"), plan_of(tmp_path / "killed")
    wanted = launch(whole, ranks=2)
    assert [each["step"] for each in wanted] == [8, 8]
    assert launch(replace(killed, die_at=3), ranks=2) == [None, None]
    found = launch(killed, ranks=2)
    assert [each["begun_at"] for each in found] == [2, 2]
    for one, other in zip(found, wanted, strict=True):
        assert one["seen"] == other["seen"][-len(one["seen"]) :]
        assert len(one["seen"]) == 10
    assert ends(found) == ends(wanted)
    assert found[0]["steps"] == [6, 8], "keep=2"
    with ckpt.open(killed.root) as opened:
        assert {"model.0.weight", "optimizer.state.model.0.weight.exp_avg"} <= {*opened}


def test_two_ranks_of_fsdp2_that_are_killed_end_alike_and_one_process_goes_on_from_them(
    launch: Launch, tmp_path: Path
) -> None:
    how = {"is_split": True, "noisy": False}
    whole = plan_of(tmp_path / "whole", sharded=True, **how)
    killed = plan_of(tmp_path / "killed", sharded=True, **how)
    wanted = launch(whole, ranks=2)
    launch(replace(killed, die_at=5), ranks=2)
    one_process = plan_of(tmp_path / "one", **how)
    shutil.copytree(killed.root, one_process.root)

    found = launch(killed, ranks=2)
    assert [each["begun_at"] for each in found] == [4, 4]
    assert ends(found) == ends(wanted)

    (alone,) = launch(one_process, ranks=1)
    left = len(alone["seen"])
    pairs = zip(wanted[0]["seen"], wanted[1]["seen"], strict=True)
    assert alone["seen"] == [one + other for one, other in pairs][-left:]
    assert (alone["begun_at"], left) == (4, 22)
    assert alone["weights"] == pytest.approx(wanted[0]["weights"], rel=1e-4, abs=1e-6)
