"""Users' mistakes, end to end: a sentence with the remedy, exit code 1 or 2, never a traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tree import ROOT

from holdfast import ckpt


def holdfast(*words: str | Path | int, limit: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command; ``limit`` is passed to the shell's ulimit first."""
    command = [sys.executable, "-m", "holdfast.tools.cli", *map(str, words)]
    if limit:
        command = ["bash", "-c", f'ulimit {limit}; exec "$@"', "bash", *command]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, cwd=ROOT, check=False
    )
    assert "Traceback" not in done.stderr + done.stdout
    return done


def one_paragraph(done: subprocess.CompletedProcess[str]) -> str:
    """Assert that stderr is an error of one paragraph, and return it."""
    output = done.stderr.strip()
    assert output.startswith(("error: ", "holdfast: ")), done.stderr
    assert "\n\n" not in output
    return output


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints"
    ckpt.save(root, {"x": torch.arange(4000.0)}, step=7)
    return root


def the_pack(root: Path) -> Path:
    return next((root / "step-000000000007" / "data").iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["nosuch"],
        ["inspect"],
        ["demo", "--nosuch"],
        ["demo", "--seed", "many"],
        ["run", "--nproc", "0", "train.py"],
        ["reshard", "a", "b", "--mesh", "tp=0"],
        ["prune", "x", "--keep-last", "0"],
    ],
)
def test_a_bad_flag_is_2_with_the_usage(words: list[str]) -> None:
    done = holdfast(*words)
    assert done.returncode == 2
    assert "usage: holdfast" in done.stderr


@pytest.mark.parametrize("command", ["inspect", "verify", "prune"])
def test_a_missing_checkpoint_is_1_and_names_the_path(command: str, tmp_path: Path) -> None:
    done = holdfast(command, tmp_path / "nowhere")
    assert done.returncode == 1
    assert str(tmp_path / "nowhere") in one_paragraph(done)


def test_a_missing_script_is_2_and_names_the_path() -> None:
    done = holdfast("run", "nowhere.py")
    assert done.returncode == 2
    assert "nowhere.py" in one_paragraph(done)


def test_a_port_in_use_is_2_and_names_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = holdfast("run", "--port", port, script)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in one_paragraph(done)
    assert "in use" in done.stderr


def test_a_step_that_is_not_there_lists_those_that_are(checkpoints: Path) -> None:
    done = holdfast("inspect", checkpoints, "--step", "8")
    assert done.returncode == 1
    assert "7" in one_paragraph(done)


def test_a_truncated_pack_is_found_and_named(checkpoints: Path) -> None:
    pack = the_pack(checkpoints)
    pack.write_bytes(pack.read_bytes()[:-100])
    done = holdfast("verify", checkpoints)
    assert done.returncode == 1
    assert pack.name in done.stdout + done.stderr


def test_a_flipped_bit_is_found_by_a_deep_check(checkpoints: Path) -> None:
    pack = the_pack(checkpoints)
    data = bytearray(pack.read_bytes())
    data[1000] ^= 1
    pack.write_bytes(data)
    assert holdfast("verify", checkpoints).returncode == 0
    done = holdfast("verify", "--deep", checkpoints)
    assert done.returncode == 1
    assert pack.name in done.stdout + done.stderr


def test_a_full_disk_leaves_nothing_that_counts(checkpoints: Path, tmp_path: Path) -> None:
    """A limit on file size stands for the full disk: the write fails in the middle."""
    target = tmp_path / "target"
    done = holdfast("reshard", checkpoints, target, "--mesh", "dp=2", limit="-f 4")
    assert done.returncode == 1
    assert "target" in one_paragraph(done)
    assert not list(target.rglob("manifest.json"))
    assert holdfast("verify", "--deep", checkpoints).returncode == 0


def test_a_report_directory_that_is_a_file_is_refused_before_anything_runs(tmp_path: Path) -> None:
    place = tmp_path / "report"
    place.write_text("a file")
    done = holdfast("demo", "--report-dir", place)
    assert done.returncode == 2
    assert "--report-dir" in one_paragraph(done)
    assert place.read_text() == "a file"


def test_too_few_steps_for_the_kills_are_refused_before_anything_runs(tmp_path: Path) -> None:
    done = holdfast("demo", "--quick", "--steps", "5", "--report-dir", tmp_path / "report")
    assert done.returncode == 2
    assert "--steps" in one_paragraph(done)
    assert not (tmp_path / "report").exists()
