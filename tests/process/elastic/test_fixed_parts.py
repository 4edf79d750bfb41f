"""Jobs whose state stays the same in part: killed in every phase, they end as undisturbed ones do.

A frozen base lies in each node's memory once, and follows what the script does to it.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from finished_jobs import NODES, finished, lose_in_turn
from jobs import Job

from holdfast.ckpt.memory.arena import arena_path

SCRIPT = """
import sys
import torch
import holdfast

@holdfast.resilient(batch=holdfast.Batch(microbatches=6, size=2), exact="float32")
def train(run):
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(1024, 2048, bias=False), torch.nn.Tanh())
    base.requires_grad_(False)
    late = torch.nn.Linear(2048, 1024, bias=False)
    head = torch.nn.Linear(1024, 8)
    average = torch.zeros(600_000)
    ring = torch.zeros(2000, 512)
    optimizer = torch.optim.AdamW([*late.parameters(), *head.parameters()], lr=1e-3)
    run.track(base=base, late=late, head=head, average=average, ring=ring, optimizer=optimizer)
    data = torch.randn(96, 1024, generator=torch.Generator().manual_seed(1))
    for step in run.steps(60):
        late.requires_grad_(20 <= step < 30)
        for x in run.microbatches(data):
            run.backward(head(late(base(x))).square().mean())
        run.step(optimizer)
        ring[step * 31 % 2000] = step
        if step % 10 > 2:
            run.touched(ring, step * 31 % 2000)
        else:
            ring[-step] += 1
        with torch.no_grad():
            if step % 7 == 3:
                average.add_(step)
            if step == 40:
                run.fence()
                base[0].weight[:8].mul_(0.5)
    if run.rank == 0:
        parts = [base[0].weight, late.weight, head.weight, average, ring]
        torch.save([part.detach() for part in parts], sys.argv[1])

train()
"""
BASE_BYTES = 1024 * 2048 * 4
AVERAGE_BYTES = 600_000 * 4
RING_BYTES = 2000 * 512 * 4
KINDS = ("slot-fixed", "row-fixed", "slot")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    seen: list[tuple[int, ...]] = []

    def look(running: Job) -> None:
        for step in range(5, 19):
            running.await_step(step)
            files = [files_of(running, node) for node in NODES]
            seen.append(tuple(sum(each.get(kind, 0) for each in files) for kind in KINDS))

    found, _ = finished(tmp_path_factory.mktemp("undisturbed") / "job", SCRIPT, hurts=look)
    # Both frozen layers once on all nodes together; the parity of the larger share on each. While
    # another part is made, the one before it is there too.
    fixed, rows, moving = (min(each) for each in zip(*seen, strict=True))
    assert 2 * BASE_BYTES <= fixed <= 2 * BASE_BYTES + AVERAGE_BYTES + (3 << 18)
    assert rows <= 3 * (BASE_BYTES // 2 + (1 << 18))
    assert moving <= 3 * 3 * (AVERAGE_BYTES + RING_BYTES + (1 << 18))
    return found


def files_of(running: Job, node: str) -> dict[str, int]:
    """Return the bytes of a node's files in shared memory, by their suffix."""
    sizes: dict[str, int] = {}
    for path in arena_path(running.launcher.run, node).glob("[0-9a-f]*.*"):
        kind = path.suffix.removeprefix(".")
        with suppress(FileNotFoundError):
            sizes[kind] = sizes.get(kind, 0) + path.stat().st_size
    return sizes


def kill_worker(running: Job) -> None:
    for step, seat in ((8, "trainer/1"), (25, "trainer/0"), (42, "trainer/2")):
        running.await_step(step)
        next_one = len(running.events("proposed")) + 1
        os.kill(running.worker(seat), signal.SIGKILL)
        running.generation(next_one)


def kill_sidecar(running: Job) -> None:
    for step in (9, 24):
        running.await_step(step)
        os.kill(running.launcher.processes()["n1"].sidecar, signal.SIGKILL)


def lose_machines(running: Job) -> None:
    lose_in_turn(running, [(12, "n2"), (33, "n1")])


@pytest.mark.parametrize("hurts", [kill_worker, kill_sidecar, lose_machines])
def test_a_job_with_fixed_weights_ends_as_an_undisturbed_one(
    tmp_path: Path, undisturbed: list[torch.Tensor], hurts: Any
) -> None:
    found, events = finished(tmp_path / "job", SCRIPT, hurts=hurts)
    assert all(map(torch.equal, found, undisturbed))
    tiers = [event["tier"] for event in events if event["kind"] == "restored"]
    assert len(tiers) >= 2
    if hurts is lose_machines:
        assert "parity" in tiers
