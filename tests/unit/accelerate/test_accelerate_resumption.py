"""A run that is stopped anywhere goes on in the same bits, however its order comes about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_packages import needs

from holdfast.ckpt import MismatchError, StateError

pytestmark = needs("accelerate")

STOPS = [(1, 1), (2, 5), (1, 6), (3, 7), (6, 13)]
"""Pairs of steps between saves and the step of the stop; an epoch has five or six steps."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stopped(root: Path, kind: str, **how: Any) -> None:
    from accelerate_runs import Script, StoppedError

    with pytest.raises(StoppedError):
        Script(kind).run(root, **how)


@pytest.mark.parametrize(
    "kind",
    [
        *("shuffled", "seedable", "generator", "weighted", "global"),
        *("uneven", "unbatched", "stream", "dropping"),
    ],
)
def test_a_stopped_run_ends_in_the_bits_of_an_undisturbed_one(kind: str, tmp_path: Path) -> None:
    from accelerate_runs import Script

    whole = Script(kind).run(tmp_path / "whole", every=100)
    wanted = whole.outcome
    for every, stop_at in STOPS:
        root = tmp_path / f"{every}-{stop_at}"
        stopped(root, kind, every=every, stop_at=stop_at)
        found = Script(kind).run(root, every=every)
        left = whole.step - stop_at // every * every
        assert found.seen == whole.seen[-left:], (every, stop_at)
        assert found.outcome == wanted, (every, stop_at)


def test_a_loader_with_worker_processes_goes_on_alike(tmp_path: Path) -> None:
    from accelerate_runs import Script, StoppedError

    whole = Script("workers").run(tmp_path / "whole", every=100)
    wanted = whole.outcome
    whole.end_workers()
    broken_off = Script("workers")
    with pytest.raises(StoppedError):
        broken_off.run(tmp_path / "a", every=2, stop_at=9)
    broken_off.end_workers()
    found = Script("workers").run(tmp_path / "a", every=2)
    assert found.seen == whole.seen[-len(found.seen) :]
    assert found.outcome == wanted
    found.end_workers()


def test_a_run_that_is_stopped_twice_in_an_epoch_goes_on_alike(tmp_path: Path) -> None:
    from accelerate_runs import Script

    wanted = Script().run(tmp_path / "whole", every=100).outcome
    stopped(tmp_path / "a", "shuffled", every=2, stop_at=9)
    stopped(tmp_path / "a", "shuffled", every=2, stop_at=11)
    assert Script().run(tmp_path / "a", every=2).outcome == wanted


@pytest.mark.parametrize("kind", ["hidden", "in passing"])
def test_an_order_that_nobody_can_restore_is_refused(kind: str, tmp_path: Path) -> None:
    from accelerate_runs import Script

    stopped(tmp_path / "a", kind, every=1, stop_at=8)
    with pytest.raises(MismatchError, match=r"loader: the 8 samples before the position"):
        Script(kind).run(tmp_path / "a", every=1)


def test_another_data_set_is_refused_or_begun_anew(tmp_path: Path) -> None:
    from accelerate_runs import Drawn, Script

    stopped(tmp_path / "a", "shuffled", every=1, stop_at=8)
    with pytest.raises(MismatchError, match=r"Give the same data set .* load\(data=False\)"):
        Script(data=Drawn(30)).run(tmp_path / "a", every=1)
    found = Script(data=Drawn(30)).run(tmp_path / "a", every=100, data=False)
    assert found.step == 8 + 3 * 8, "three whole epochs"


def test_a_batch_size_that_fits_goes_on_and_another_is_refused(tmp_path: Path) -> None:
    from accelerate_runs import Drawn, Script
    from torch.utils.data import DataLoader

    whole = Script().run(tmp_path / "whole", every=100)
    order = [number for epoch, numbers, _ in whole.seen if epoch == 1 for number in numbers]
    stopped(tmp_path / "a", "shuffled", every=1, stop_at=9)

    def with_size(size: int) -> Any:
        script = Script()
        loader = DataLoader(Drawn(), batch_size=size, shuffle=True)
        script.accelerator._dataloaders.clear()
        script.loader = script.accelerator.prepare(loader)
        return script

    found = with_size(2).run(tmp_path / "a", every=100)
    assert [n for epoch, numbers, _ in found.seen if epoch == 1 for n in numbers] == order[12:]
    with pytest.raises(StateError, match="a batch size that divides 12"):
        with_size(5).run(tmp_path / "a", every=100)


def test_a_loop_that_begins_at_another_epoch_is_refused(tmp_path: Path) -> None:
    from accelerate_runs import Script

    from holdfast.adapters.accelerate import AcceleratorCheckpoints

    stopped(tmp_path / "a", "shuffled", every=1, stop_at=8)
    script = Script()
    AcceleratorCheckpoints(script.accelerator, tmp_path / "a").load()
    script.loader.set_epoch(0)
    with pytest.raises(StateError, match=r"begins epoch 0, the checkpoint is in epoch 1"):
        next(iter(script.loader))


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("before", [1, 2, 3])
def test_other_processes_share_out_the_rest_of_the_order(before: int, is_split: bool) -> None:
    from accelerate.data_loader import prepare_data_loader
    from accelerate_runs import Drawn, fresh, loader_of

    from holdfast.adapters.accelerate.loaders import RecordedLoader

    size = 12 if is_split else 4

    def prepared(processes: int, index: int) -> tuple[Any, RecordedLoader]:
        fresh()
        loader = loader_of("generator", Drawn(96))
        loader = torch.utils.data.DataLoader(
            loader.dataset, size, shuffle=True, generator=loader.generator
        )
        ready = prepare_data_loader(
            loader, num_processes=processes, process_index=index, split_batches=is_split
        )
        return ready, RecordedLoader(ready, name="loader", device=torch.device("cpu"))

    def numbers(loader: Any) -> list[list[int]]:
        return [each.tolist() for each, _ in loader]

    order = [n for each in numbers(prepared(1, 0)[0]) for n in each]
    first, recorded = prepared(before, 0)
    iterator = iter(first)
    for _ in range(2):
        next(iterator)
    position, state = recorded.position, recorded.rank_state()
    for processes in (1, 2, 3, 4):
        found = []
        for index in range(processes):
            loader, mine = prepared(processes, index)
            mine.go_on(position, state, now=[])
            found.append(numbers(loader))
        rounds = [n for each in zip(*found, strict=True) for numbers in each for n in numbers]
        left = order[position.samples :]
        assert rounds[: len(left)] == left, processes
        assert position.samples == 2 * size * (1 if is_split else before)


def test_two_loaders_that_are_read_in_turns_go_on_alike(tmp_path: Path) -> None:
    from accelerate_runs import fresh, loader_of

    from holdfast.adapters.accelerate import AcceleratorCheckpoints

    def read(root: Path, *, save_at: int) -> list[float]:
        accelerator = fresh()
        first, second = accelerator.prepare(loader_of("shuffled"), loader_of("weighted"))
        checkpoints = AcceleratorCheckpoints(accelerator, root)
        step, found = checkpoints.load(), []
        for (_, x), (_, y) in zip(first, second, strict=True):
            found.append(float(x.sum() + y.sum() + torch.rand(1)))
            step += 1
            if step == save_at:
                checkpoints.save(step)
        return found

    whole = read(tmp_path / "a", save_at=3)
    assert read(tmp_path / "a", save_at=0) == whole[3:]
