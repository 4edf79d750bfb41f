"""A process runs one job after the other, as a notebook does, and is restored after each."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

_SCRIPT = """
import gc, json, os, sys, threading, time
import torch, torch.distributed as dist
import holdfast

def uncaught(*args):
    pass

sys.excepthook = uncaught
kept = {}

def body(run, rate, wrong):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    extra = torch.nn.Linear(1, 1)
    other = torch.optim.SGD(extra.parameters(), lr=rate)
    kept.update(model=model, optimizer=optimizer, other=other, step=optimizer.step)
    run.track(model=model, optimizer=optimizer, extra=extra, other=other)
    for step in run.steps(4):
        for x in run.microbatches(torch.ones(8, 4)):
            run.backward(model(x).sum())
        run.step(optimizer, other)
        if step == 1:
            kept["hooked"] = [len(o._optimizer_step_pre_hooks) for o in (optimizer, other)]
            if wrong == "ours":
                run.step()
            if wrong == "theirs":
                raise ValueError("theirs")
    return float(model.bias)

train = holdfast.resilient(batch=holdfast.Batch(microbatches=2), exact="float32")(body)

def now():
    until = time.monotonic() + 60
    while time.monotonic() < until and threading.active_count() > 1:
        time.sleep(0.02)  # threads that are told to end
    gc.collect()
    optimizers = [kept["optimizer"], kept["other"]]
    before = kept["model"].bias.item()
    kept["optimizer"].step()
    return {
        "hook": sys.excepthook is uncaught,
        "frozen": gc.get_freeze_count(),
        "group": dist.is_initialized(),
        "hooks": [len(o._optimizer_step_pre_hooks) for o in optimizers],
        "step": kept["optimizer"].step == kept["step"] and "step" not in vars(kept["optimizer"]),
        "unchanged": before == kept["model"].bias.item(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": len(os.listdir("/proc/self/fd")),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
    }

def call(rate, wrong=""):
    try:
        result = train(rate, wrong)
    except (holdfast.elastic.ConfigError, ValueError) as error:
        result = [type(error).__name__, vars(error)]
    return {"result": result, "hooked": kept["hooked"], **now()}

print(json.dumps([call(0.5), call(0.25), call(0.5, "ours"), call(0.5, "theirs"), call(0.5)]))
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of five calls of the decorated function in one process; two failed."""
    script = tmp_path_factory.mktemp("script") / "script.py"
    script.write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_each_call_is_a_job_of_its_own(calls: list[dict[str, Any]]) -> None:
    first, second, ours, theirs, last = (call["result"] for call in calls)
    assert first == last != second
    assert ours == ["ConfigError", {}]
    assert theirs == ["ValueError", {}]


def test_the_process_is_the_users_again_after_each(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        assert call["hook"], "sys.excepthook is the one from before"
        assert call["frozen"] == 0
        assert not call["group"]
        assert call["threads"] == ["MainThread"]
        assert call["children"] == ""
    assert calls[-1]["files"] == calls[1]["files"]


def test_optimizers_wait_for_snapshots_while_it_trains_and_only_then(
    calls: list[dict[str, Any]],
) -> None:
    for call in calls:
        assert call["hooked"] == [1, 1], "one hook each"
        assert call["hooks"] == [0, 0]
        assert call["step"], "optimizer.step is what it was"
        assert call["unchanged"], "no gradient is left, so a step changes nothing"
