"""Ctrl-C in the middle of long work: it says what is kept, and nothing that is half is seen."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast import ckpt
from holdfast.ckpt.checkpoints.catalog import committed_steps

HELPERS = Path(__file__).parents[1] / "helpers"
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("long") / "saved"
    state = {"model": {f"w{n}": torch.randn(512, 1024) for n in range(12)}}
    ckpt.save(root, state, step=3)
    return root


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for each in started:
        with each:
            each.kill()


def interrupted(slow: list[subprocess.Popen[str]], *words: str | Path) -> str:
    """Run a command, interrupt it when a part of its work is done, and return its stderr."""
    process = subprocess.Popen(
        [sys.executable, str(HELPERS / "slow_tool.py"), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    slow.append(process)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("advanced ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    return err


def completed(*words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.tools.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps_in(root: Path) -> list[int]:
    return committed_steps(root) if root.exists() else []


def test_reshard(saved: Path, tmp_path: Path, slow: list[subprocess.Popen[str]]) -> None:
    words = ["reshard", saved, tmp_path / "new", "--mesh", "dp=2", "--memory", "8MiB"]
    err = interrupted(slow, *words)
    assert "stopped at writing: " in err
    assert f"{saved} is as before, and {tmp_path / 'new'} shows no new step" in err
    assert "the same command goes on after the last complete writer" in err
    assert steps_in(tmp_path / "new") == []
    assert "step 3 written" in completed(*words)
    assert steps_in(tmp_path / "new") == [3]


def test_convert(saved: Path, tmp_path: Path, slow: list[subprocess.Popen[str]]) -> None:
    target = tmp_path / "out.safetensors"
    words = ["convert", saved, target, "--memory", "8MiB"]
    err = interrupted(slow, *words)
    assert "stopped at converting: " in err
    assert "shows nothing that is half written; the same command begins anew" in err
    assert list(tmp_path.iterdir()) == []
    assert "12 tensors" in completed(*words)
    assert target.exists()


def test_verify(saved: Path, slow: list[subprocess.Popen[str]]) -> None:
    err = interrupted(slow, "verify", saved, "--deep", "--threads", "1")
    assert "stopped at checking: " in err
    assert "Nothing was changed; the same command checks anew." in err


def test_diff(saved: Path, slow: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    ckpt.save(
        tmp_path / "b", {"model": {f"w{n}": torch.zeros(512, 1024) for n in range(12)}}, step=3
    )
    err = interrupted(slow, "diff", saved, tmp_path / "b", "--memory", "8MiB")
    assert "Nothing was changed." in err
