"""torchtitan's own trainer, on CPUs, keeps its checkpoints with Holdfast."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from document_blocks import blocks
from programs import Run

import holdfast
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.tools.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs" / "how-to" / "torchtitan.md"
OVERRIDE = "holdfast.adapters.torchtitan.override.checkpoints"

EVERY, LAST = 2, 6
NAMES = re.findall(r"^def case_(\w+)", (HERE / "titan_cases.py").read_text(), re.MULTILINE)
"""The cases of one rank, which run in one process."""

SMALL = (
    *("--training.local_batch_size", "1", "--training.global_batch_size", "6"),
    *("--training.seq_len", "32", "--checkpoint.enable", "--checkpoint.interval", str(EVERY)),
)


class Titan:
    """Runs torchtitan's trainer in one folder; each run has its dump folder by name."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self.folder = run, folder
        run("python", str(HERE / "titan_assets.py"), str(folder))
        (folder / "my_run.py").write_text(blocks(GUIDE, "python")[0])

    def root(self, name: str) -> Path:
        return self.folder / name / "checkpoint"

    def train(
        self, name: str, *arguments: str, ranks: int = 2, steps: int = LAST, **settings: Any
    ) -> None:
        chosen = ["--module", "my_run", "--config", "my_run", *SMALL, *arguments]
        self.launch(name, *chosen, ranks=ranks, steps=steps, **settings)

    def launch(self, name: str, *arguments: str, ranks: int, steps: int, **settings: Any) -> None:
        told = [*arguments, "--dump_folder", name, "--training.steps", str(steps)]
        job = (str(HERE / "titan_job.py"), json.dumps({"arguments": told, **settings}))
        launcher = ("python", "-m", "torch.distributed.run", "--standalone")
        self._run(*launcher, f"--nproc-per-node={ranks}", *job, cwd=self.folder)

    def fails(self, name: str, *arguments: str, **settings: Any) -> str:
        """Return what a run said that was to fail."""
        with pytest.raises(AssertionError) as failed:
            self.train(name, *arguments, **settings)
        return str(failed.value)


@pytest.fixture(scope="module")
def titan(torchtitan: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Titan]:
    yield Titan(torchtitan, tmp_path_factory.mktemp("torchtitan"))


@pytest.fixture(scope="module")
def undisturbed(titan: Titan) -> Path:
    """The root of a run that nothing disturbed."""
    titan.train("undisturbed")
    return titan.root("undisturbed")


def content(root: Path, step: int, *, without: str = "") -> dict[str, str]:
    """Return the digest of every tensor and value of a step."""
    with holdfast.open(root, step=step) as opened:
        found = {name: opened[name][...].contiguous() for name in opened}
        digests = {
            name: hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, t in found.items()
        }
        digests |= {name: repr(value) for name, value in opened.values.items()}
    return {
        name: digest
        for name, digest in digests.items()
        if not name.startswith("dcp.paths.") and not (without and name.startswith(without))
    }


def test_an_undisturbed_run_keeps_everything_with_holdfast(undisturbed: Path) -> None:
    assert committed_steps(undisturbed) == [2, 4, 6]
    found = content(undisturbed, LAST)
    assert "layers.1.feed_forward.w2.weight" in found
    assert "optimizer.state.layers.1.feed_forward.w2.weight.exp_avg" in found
    assert found["train_state.step"] == str(LAST)
    assert {"dataloader.dp_rank_0", "dataloader.dp_rank_1", "lr_scheduler.last_epoch"} <= set(found)


@pytest.mark.parametrize(
    ("mode", "step", "where", "there"),
    [
        ("disabled", 4, "write", {2}),
        ("async", 4, "write", {2}),
        ("async_with_pinned_mem", 5, "step", {2, 4}),  # the save of step 4 ended or did not
    ],
)
def test_a_killed_run_ends_as_the_undisturbed_one(
    titan: Titan, undisturbed: Path, mode: str, step: int, where: str, there: set[int]
) -> None:
    options = ("--checkpoint.async_mode", mode)
    titan.fails(mode, *options, kill={"rank": 1, "step": step, "where": where})
    assert {2} <= set(committed_steps(titan.root(mode))) <= there
    second = titan.root(mode) / "step-000000000002" / "data"
    kept = sorted(second.iterdir())
    titan.train(mode, *options)
    assert sorted(second.iterdir()) == kept  # a run that had begun anew would have saved it again
    assert content(titan.root(mode), LAST) == content(undisturbed, LAST)


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_load_equal_values(
    titan: Titan, undisturbed: Path, ranks: int
) -> None:
    target = titan.folder / f"on_{ranks}"
    options = ("--checkpoint.load_step", "4", "--checkpoint.exclude_from_loading", "dataloader")
    titan.train("undisturbed", *options, ranks=ranks, copy=str(target))
    assert content(target, 4, without="dataloader") == content(undisturbed, 4, without="dataloader")


def test_a_resharded_checkpoint_loads_on_its_ranks(titan: Titan, undisturbed: Path) -> None:
    cut = titan.folder / "cut" / "checkpoint"
    assert main(["verify", str(undisturbed)]) == 0
    assert main(["inspect", str(undisturbed)]) == 0
    assert main(["reshard", str(undisturbed), str(cut), "--step", "4", "--mesh", "dp=3"]) == 0
    target = titan.folder / "from_cut"
    options = ("--checkpoint.exclude_from_loading", "dataloader")
    titan.train("cut", *options, ranks=3, copy=str(target))
    assert content(target, 4, without="dataloader") == content(undisturbed, 4, without="dataloader")


def test_places_in_the_data_of_other_ranks_are_refused_with_the_remedy(
    titan: Titan, undisturbed: Path
) -> None:
    said = titan.fails("undisturbed", ranks=1)
    assert "has the places of 2 data-parallel ranks in the data, this run has 1" in said
    assert "give --checkpoint.exclude_from_loading dataloader" in said


def test_the_command_line_alone_chooses_holdfast(titan: Titan) -> None:
    model = ("--module", "llama3", "--config", "llama3_debugmodel")
    override = ("--override.imports", OVERRIDE)
    titan.launch("overridden", *model, *SMALL, *override, ranks=1, steps=2)
    assert committed_steps(titan.root("overridden")) == [2]


@pytest.fixture(scope="module")
def cases(torchtitan: Run, titan: Titan) -> dict[str, str]:
    """The traceback of every case of titan_cases.py, empty where it passed."""
    said = torchtitan("python", str(HERE / "titan_cases.py"), cwd=titan.folder)
    found: dict[str, str] = json.loads(said.rpartition("CASES ")[2])
    return found


def test_every_case_ran(cases: dict[str, str]) -> None:
    assert set(cases) == set(NAMES)


@pytest.mark.parametrize("case", NAMES)
def test_case(cases: dict[str, str], case: str) -> None:
    assert not cases[case], cases[case]
