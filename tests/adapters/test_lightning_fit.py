"""A LightningModule in Holdfast's loop: killed in many places, and beside Lightning's own loop."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from document_blocks import blocks
from programs import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

JOB = Path(__file__).with_name("lightning_fit_job.py")
REFUSALS = Path(__file__).with_name("lightning_fit_refusals.py")
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "lightning.md"
PLACES = ("step:3", "validation:6", "epoch:8", "save:12", "log:13")


def alone(run: Run, folder: Path, *options: str) -> dict[str, Any]:
    run("python", str(JOB), str(folder), *options)
    return ended(folder)


def launched(run: Run, folder: Path, *options: str) -> dict[str, Any]:
    folder.mkdir()
    words = ("-m", "holdfast.tools.cli", "run", "--nproc", "2", "--run-dir", str(folder / "run"))
    run("python", *words, str(JOB), str(folder), *options)
    return ended(folder)


def ended(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "end.json").read_text())
    return found


def deaths(folder: Path) -> set[str]:
    return {each.name.removeprefix("died-") for each in folder.glob("died-*")}


@pytest.fixture(scope="module")
def whole(lightning: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the end of an undisturbed run on one rank."""
    return alone(lightning, tmp_path_factory.mktemp("whole") / "run")


def test_an_undisturbed_run_stops_early_and_keeps_the_best_files(whole: dict[str, Any]) -> None:
    assert (whole["step"], whole["epoch"]) == (18, 5), "in the middle of the last epoch"
    assert whole["counts"][0] == 18
    assert sorted(whole["saves"]) == ["epoch=3-step=16.ckpt", "epoch=4-step=18.ckpt", "last.ckpt"]
    assert whole["loaded"][0] == 0, "Lightning loads a file"
    (table,) = whole["table"]
    rows = list(csv.DictReader(table.splitlines()))
    steps = [int(row["step"]) for row in rows if row["loss_step"]]
    assert steps == list(range(1, 18, 2)), "each point once"


def test_two_ranks_that_are_killed_in_all_places_end_as_one_that_is_left_alone(
    whole: dict[str, Any], lightning: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    found = launched(lightning, folder, "--die", *PLACES)
    assert deaths(folder) == {each.replace(":", "-") for each in PLACES}
    assert found == whole


def test_a_job_that_is_begun_again_from_its_checkpoint_writes_no_point_twice(
    whole: dict[str, Any], lightning: Run, tmp_path: Path
) -> None:
    folder, store = tmp_path / "job", tmp_path / "store"
    words = ("--checkpoint", str(store), "--die", "validation:14")
    with pytest.raises(AssertionError):
        alone(lightning, folder, *words)
    assert deaths(folder) == {"validation-14"}
    assert alone(lightning, folder, *words) == whole


def test_sharded_layers_end_in_the_bits_of_one_rank(lightning: Run, tmp_path: Path) -> None:
    found = launched(lightning, tmp_path / "two", "--sharded", "--die", "step:5", "save:10")
    assert deaths(tmp_path / "two") == {"step-5", "save-10"}
    assert found == alone(lightning, tmp_path / "one", "--sharded")


@pytest.fixture(scope="module")
def compared(lightning: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of runs by `fit` and by Lightning's own Trainer."""
    folder = tmp_path_factory.mktemp("compared") / "run"
    lightning("python", str(JOB), str(folder), "--compare")
    return folder


@pytest.mark.parametrize(("name", "close"), [("one", 1e-4), ("other", 0.02)])
def test_lines_and_files_are_those_of_lightnings_own_loop(
    name: str, close: float, compared: Path
) -> None:
    ours, theirs = (
        list(csv.DictReader((compared / name / who / "run" / "metrics.csv").open()))
        for who in ("ours", "theirs")
    )
    assert len(ours) == len(theirs) > 20
    for mine, other in zip(ours, theirs, strict=True):
        assert [key for key in mine if mine[key]] == [key for key in other if other[key]]
        for key in {*mine} - {"largest", "twice"}:  # of microbatches, not of the batch
            if mine[key]:
                assert float(mine[key]) == pytest.approx(float(other[key]), rel=close), key
    names = [
        sorted(each.name for each in (compared / name / who).iterdir())
        for who in ("our-saves", "their-saves")
    ]
    assert names[0] == names[1]


@pytest.fixture(scope="module")
def refused(lightning: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the messages of what is refused."""
    said = lightning("python", str(REFUSALS), str(tmp_path_factory.mktemp("refused")))
    found: dict[str, str] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no module", "Linear is no lightning.pytorch.LightningModule"),
        ("manual", "write the loop with run.step, also for several optimizers and GANs"),
        ("global", "is a global variable"),
        ("twice", "was given to `fit` before"),
        ("optimizers", "must return one optimizer of torch's"),
        ("no optimizer", "must return one optimizer of torch's"),
        ("stream", "give a data set that can be indexed"),
        ("loaders", "give one DataLoader"),
        ("drop_last", "the last step of an epoch has the rest"),
        ("no loss", "without a loss: return the loss of the microbatch"),
        ("attribute", "training_step changed module.last"),
        ("metric", "log numbers, or update it in validation_step"),
        ("log twice", "give two names"),
        ("batch", "a hook of the step reads batch"),
        ("outputs", "a hook of the step reads outputs"),
        ("experiment", "CSVLogger.experiment would write at once"),
        ("trainer", "trainer.validate has no meaning in Holdfast's loop"),
        ("object", "set module.last to a object, which a restore cannot make"),
        ("skip", "a hook of the step reads batch"),
        ("interval", "an epoch has 2 steps: give fewer"),
        ("endless", "give max_steps, or a number of epochs"),
    ],
)
def test_what_would_come_out_wrong_is_refused(
    name: str, words: str, refused: dict[str, str]
) -> None:
    assert words in refused[name]


def test_the_script_of_the_guide_runs(lightning: Run, tmp_path: Path) -> None:
    (script,) = blocks(GUIDE, "python")
    place = tmp_path / "train.py"
    place.write_text(script)
    said = lightning("python", str(place), cwd=tmp_path)
    assert "8 steps" in said
    assert (tmp_path / "logs" / "version_0" / "metrics.csv").exists()
    assert list((tmp_path / "saves").iterdir())
