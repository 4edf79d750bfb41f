"""The shell's own completion, with the script that ``holdfast completion`` prints."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 120.0

COMPLETE = """
source ./holdfast.bash
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
function=$(complete -p holdfast | sed -E 's/.*-F ([^ ]+).*/\\1/')
compopt() { :; }
$function holdfast "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.tools.cli", "completion", shell],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    ).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("completion")
    (made / "holdfast.bash").write_text(script("bash"))
    (made / "train.py").touch()
    (made / "folder").mkdir()
    return made


def completed(folder: Path, *words: str) -> set[str]:
    """Return bash's completions of the last word."""
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert not done.stderr
    return set(filter(None, done.stdout.splitlines()))


def test_bash_completes_commands(folder: Path) -> None:
    assert {"run", "reshard", "ray"} <= completed(folder, "holdfast", "r")
    assert completed(folder, "holdfast", "pl") == {"plan"}


def test_bash_completes_options_and_choices(folder: Path) -> None:
    assert completed(folder, "holdfast", "run", "--npr") == {"--nproc"}
    assert {"--parity", "--parity-group"} <= completed(folder, "holdfast", "run", "--parity")
    found = completed(folder, "holdfast", "run", "--on-checkpoint-error", "")
    assert {"retry", "skip", "stop"} <= found
    assert completed(folder, "holdfast", "completion", "z") == {"zsh"}
    assert completed(folder, "holdfast", "ray", "submit", "--gpu") == {"--gpus"}


def test_bash_completes_paths(folder: Path) -> None:
    assert "train.py" in completed(folder, "holdfast", "run", "--config", "tr")
    assert "folder" in completed(folder, "holdfast", "run", "--run-dir", "fo")
    assert "train.py" not in completed(folder, "holdfast", "run", "--run-dir", "")


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_accept_their_script(shell: str, tmp_path: Path) -> None:
    text = script(shell)
    assert "holdfast" in text
    if found := shutil.which(shell):
        path = tmp_path / "script"
        path.write_text(text)
        subprocess.run([found, "-n", str(path)], check=True, timeout=DEADLINE_S)
