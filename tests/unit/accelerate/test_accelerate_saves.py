"""`AcceleratorCheckpoints` saves between steps, names and removes steps, and refuses the rest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from adapter_packages import needs

from holdfast import ckpt
from holdfast.adapters.accelerate import AcceleratorCheckpoints
from holdfast.ckpt import ArgumentError, NotFoundError, StateError
from holdfast.ckpt.checkpoints import pins
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.store.places import open_store

pytestmark = needs("accelerate")


def script(kind: str = "shuffled", **how: Any) -> Any:
    from accelerate_runs import Script

    return Script(kind, **how)


def test_without_a_checkpoint_load_changes_nothing(tmp_path: Path) -> None:
    checkpoints = AcceleratorCheckpoints(script().accelerator, tmp_path / "a")
    before = torch.get_rng_state()
    assert checkpoints.load() == 0
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(NotFoundError, match="no checkpoint of step 4"):
        checkpoints.load(4)


def test_the_names_are_those_that_other_tools_expect(tmp_path: Path) -> None:
    run = script()
    run.accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(run.model))
    run.accelerator.prepare(torch.nn.Linear(2, 2))
    AcceleratorCheckpoints(run.accelerator, tmp_path / "a").save(3)
    with ckpt.open(tmp_path / "a") as opened:
        assert {"model.0.weight", "model_1.weight", "registered.module.0.weight"} <= {*opened}
        assert {"optimizer.groups.0.lr", "scheduler", "loaders"} <= {*opened.values}
    alone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    ckpt.load(tmp_path / "a", {"model": alone}, select="model.*", strict="ignore-extra")
    assert torch.equal(alone[0].weight, run.model[0].weight)


def test_automatic_naming_counts_saves_and_keeps_the_limit(tmp_path: Path) -> None:
    from accelerate_runs import project

    run = script(project_config=project(tmp_path, total_limit=2))
    checkpoints = AcceleratorCheckpoints(run.accelerator)
    for _ in range(4):
        checkpoints.save()
    assert committed_steps(tmp_path / "checkpoints") == [2, 3]
    again = script(project_config=project(tmp_path, total_limit=2))
    others = AcceleratorCheckpoints(again.accelerator)
    assert others.load() == 3
    others.save()
    assert committed_steps(others.root) == [3, 4]


def test_pinned_steps_and_the_last_save_stay(tmp_path: Path) -> None:
    checkpoints = AcceleratorCheckpoints(script().accelerator, tmp_path / "a", keep=1)
    checkpoints.save(5)
    pins.update(open_store(tmp_path / "a"), there=[5], pin=[5], unpin=[], host="h", now_s=0.0)
    checkpoints.save(9)
    checkpoints.save(7)
    assert committed_steps(tmp_path / "a") == [5, 7, 9]


def test_a_base_has_only_what_changed_written(tmp_path: Path) -> None:
    checkpoints = AcceleratorCheckpoints(script().accelerator, tmp_path / "a", base="latest")
    checkpoints.save(1)
    checkpoints.save(2)
    with ckpt.open(tmp_path / "a") as opened:
        assert (opened.step, len(opened.manifest.bases())) == (2, 1)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    accelerator = script().accelerator
    with pytest.raises(ArgumentError, match="give the root of the checkpoints"):
        AcceleratorCheckpoints(accelerator)
    with pytest.raises(ArgumentError, match=r"keep=0\): give a number from 1"):
        AcceleratorCheckpoints(accelerator, tmp_path, keep=0)
    with pytest.raises(ArgumentError, match="give the number of the step"):
        AcceleratorCheckpoints(accelerator, tmp_path).save()


def test_a_save_between_microbatches_is_refused(tmp_path: Path) -> None:
    run = script(gradient_accumulation_steps=2)
    checkpoints = AcceleratorCheckpoints(run.accelerator, tmp_path)
    with run.accelerator.accumulate(run.model):
        pass
    with pytest.raises(StateError, match="1 of 2 microbatches"):
        checkpoints.save(1)


def test_a_loop_over_a_loader_that_is_not_known_is_refused(tmp_path: Path) -> None:
    run = script()
    checkpoints = AcceleratorCheckpoints(run.accelerator, tmp_path)
    later = iter(run.accelerator.skip_first_batches(run.loader, 2))
    next(later)
    with pytest.raises(StateError, match=r"skip_first_batches .* load\(\) lets them go on"):
        checkpoints.save(1)


def test_a_load_inside_a_loop_is_refused(tmp_path: Path) -> None:
    run = script()
    checkpoints = AcceleratorCheckpoints(run.accelerator, tmp_path)
    checkpoints.save(1)
    running = iter(run.loader)
    next(running)
    with pytest.raises(StateError, match="leave it first"):
        checkpoints.load()


def test_after_a_loop_that_was_left_the_epoch_begins_anew(tmp_path: Path) -> None:
    run = script()
    checkpoints = AcceleratorCheckpoints(run.accelerator, tmp_path)
    for _ in run.loader:
        break
    run.loader.end()  # accelerate does not notice the break
    checkpoints.save(1)
    assert checkpoints.load() == 1
    assert len([*run.loader]) == 6


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"dispatch": True, "kind": "stream"}, "DataLoaderConfiguration.dispatch_batches=False"),
        ({"kind": "stateful"}, "leave use_stateful_dataloader out"),
        ({"kind": "shared"}, "loader and loader_1 draw from one torch.Generator"),
    ],
)
def test_loaders_whose_position_cannot_be_kept_are_refused(
    how: dict[str, Any], words: str, tmp_path: Path
) -> None:
    from accelerate_runs import loader_of

    kind = how["kind"]
    run = script(kind if kind == "stream" else "generator", dispatch=how.get("dispatch", False))
    if kind == "stateful":
        run.loader.use_stateful_dataloader = True
    if kind == "shared":
        second = loader_of("generator")
        second.sampler.generator = run.loader.batch_sampler.sampler.generator
        run.accelerator.prepare(second)
    with pytest.raises(StateError, match=words):
        AcceleratorCheckpoints(run.accelerator, tmp_path)


def test_the_scaler_of_fp16_goes_on_from_its_scale(tmp_path: Path) -> None:
    scales = []
    for value in (2.0**7, 2.0**16):
        run = script()
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=value)
        checkpoints = AcceleratorCheckpoints(run.accelerator, tmp_path)
        if checkpoints.load() == 0:
            checkpoints.save(1)
        scales.append(run.accelerator.scaler.get_scale())
    assert scales == [2.0**7, 2.0**7]


def test_a_rank_that_was_not_there_reads_as_rank_0_and_draws_numbers_of_its_own() -> None:
    from holdfast.adapters.accelerate.rank_states import share_of_rank
    from holdfast.adapters.shared.random_states import GlobalRandomness, seed_all

    now = GlobalRandomness.taken(torch.device("cpu")).saved()
    saved = [{"now": now, "loaders": {"loader": i}} for i in range(2)]
    assert share_of_rank(saved, 1, 1) is saved[1]
    shares = [share_of_rank(saved, rank, 4) for rank in (2, 3, 3)]
    assert [each["loaders"] for each in shares] == [{"loader": 0}] * 3
    seeds = [each["now"]["seed"] for each in shares]
    assert seeds[0] != seeds[1] == seeds[2]
    seed_all(seeds[0])
    assert np.random.rand() != torch.rand(1).item()


def test_a_namespace_that_is_no_accelerator_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        AcceleratorCheckpoints(SimpleNamespace(), tmp_path)
