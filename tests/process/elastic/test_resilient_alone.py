"""A decorated script started by hand: it runs, resumes from checkpoints, and refuses clearly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_scripts import ran
from tree import HELPERS

SCRIPT = HELPERS / "tiny_training.py"


def _train(result: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, SCRIPT, "--result", result, *flags]
    return ran(words)


def _trained(result: Path, *flags: object) -> dict[str, Any]:
    done = _train(result, *flags)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints of steps 3 and 5 of a run that ended early."""
    folder = tmp_path_factory.mktemp("early")
    _trained(folder / "result.json", "--steps", 5, "--checkpoint", folder / "root",
             "--checkpoint-every", 3)  # fmt: skip
    return folder / "root"


def test_a_later_run_ends_as_an_unbroken_one(tmp_path: Path, root: Path) -> None:
    result = tmp_path / "result.json"
    assert sorted(path.name[-2:] for path in root.glob("step-*")) == ["03", "05"]
    unbroken = _trained(result)
    assert _trained(result, "--checkpoint", root) == unbroken
    assert _trained(result, "--checkpoint", root) == unbroken  # nothing left to do


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seed", 1], "seed=0"),
        (["--width", 9], "model.0.weight is float32 [9, 8], saved is float32 [16, 8]"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_plainly(
    tmp_path: Path, root: Path, flags: list[object], said: str
) -> None:
    done = _train(tmp_path / "result.json", "--steps", 20, "--checkpoint", root, *flags)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_directory_that_is_a_file_is_refused_plainly(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("in the way")
    done = _train(tmp_path / "result.json", "--checkpoint", tmp_path / "root")
    assert done.returncode == 1
    assert str(tmp_path / "root") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_step_is_told_to_end_before_the_fence_was_looked_at(tmp_path: Path) -> None:
    """A process that is paused in between tells later of it, not of a later step."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, time, torch\nfrom holdfast import elastic\n"
        "@elastic.resilient()\n"
        "def train(run):\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    run.track(model=model, optimizer=optimizer)\n"
        "    session = elastic.session_of(run)\n"
        "    guard, emit, looked = run._world.guard, session.emit, []\n"
        "    check = guard.check\n"
        "    def paused():\n"
        "        check()\n"
        "        looked.append(time.time())\n"
        "        time.sleep(0.3)\n"
        "    def printed(event):\n"
        "        if event.kind == 'step':\n"
        "            print(json.dumps([event.start_s + event.seconds, looked[-1]]))\n"
        "        emit(event)\n"
        "    for _ in run.steps(1):\n"
        "        for _ in run.microbatches():\n"
        "            run.backward(model(torch.ones(2)).sum())\n"
        "        run.step(optimizer)\n"
        "        guard.check, session.emit = paused, printed\n"
        "train()\n"
    )
    done = ran([sys.executable, script], check=True)
    ended, looked = json.loads(done.stdout)
    assert ended < looked + 0.1, "two clocks, and a pause three times as long"


def test_what_a_first_optimizer_imports_is_there_before_others_wait_for_it(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\nfrom holdfast import elastic\n"
        "@elastic.resilient\n"
        "def train(run):\n"
        "    before = set(sys.modules)\n"
        "    torch.optim.AdamW([torch.zeros(1)])\n"
        "    print(len(set(sys.modules) - before))\n"
        "train()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=250, check=True
    )
    assert int(done.stdout) < 5


def test_a_torch_that_was_never_tested_is_refused_by_name_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, result = tmp_path / "script.py", tmp_path / "result.json"
    script.write_text(
        "import runpy, sys, torch\ntorch.__version__ = '2.99.1+cpu'\n"
        f"sys.argv = [{str(SCRIPT)!r}, '--steps', '2', '--result', {str(result)!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    done = ran([sys.executable, script])
    assert done.returncode == 1
    assert "torch 2.99.1+cpu was never tested" in done.stderr
    assert "HOLDFAST_UNTESTED_TORCH=1" in done.stderr and "Traceback" not in done.stderr
    monkeypatch.setenv("HOLDFAST_UNTESTED_TORCH", "1")
    done = ran([sys.executable, script], check=True)
    assert done.stderr.count("torch 2.99.1+cpu was never tested") == 1
    assert result.exists()
