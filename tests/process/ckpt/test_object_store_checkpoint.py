"""Whole checkpoints in object stores, with faults in between, and the commands on them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from doubles.checkpoints import sample_arrays, write_checkpoint
from forked_scripts import ran
from numbered_states import loaded, saved
from object_places import ObjectPlace, entered
from session_imports import IMPORTING_ONCE

from holdfast import ckpt
from holdfast.ckpt.checkpoints import fence
from holdfast.ckpt.checkpoints.catalog import committed_steps, verified
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import CkptError, CorruptError, FencedError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.state.saved import read_tensors
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.testing.http_faults import FaultProxy, HttpFault, HttpFaultRule, faulty
from holdfast.tools.cli import main

COMMAND = (sys.executable, "-m", "holdfast.tools.cli")
PASSING = [
    HttpFaultRule(pattern="", fault=HttpFault.REFUSE, times=3, status=503, code="SlowDown"),
    HttpFaultRule(pattern="", fault=HttpFault.RESET_BEFORE, times=3),
    HttpFaultRule(pattern="", fault=HttpFault.RESET_DURING, times=3),
    HttpFaultRule(pattern="", fault=HttpFault.LOSE_REPLY, times=3),
]
SIGNED = [
    HttpFaultRule(pattern="", fault=HttpFault.TRUNCATE, times=3),
    HttpFaultRule(pattern="PUT|POST", fault=HttpFault.FLIP_REQUEST, times=3),
]
MOSTLY = pytest.mark.parametrize(
    "object_place", ["s3", "az", pytest.param("gs", marks=pytest.mark.exhaustive)], indirect=True
)
"""Azure's and Google's interface share the code that tries again: releases try both."""


DENIED = {"s3": "AccessDenied", "az": "AuthorizationFailure", "gs": "AccessDenied"}


@pytest.fixture
def proxy(object_environment: ObjectPlace, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with faulty(object_environment.endpoint) as running:
        entered(object_environment.through(running.endpoint), monkeypatch)
        yield running


def test_save_load_and_open(object_environment: ObjectPlace) -> None:
    root = object_environment.url
    saved(root, 1)
    saved(root, 2)
    assert loaded(root) == 2
    assert ckpt.open(root)["w"][:1, :2].tolist() == [[2.0, 2.0]]
    saved(root, 2)  # once more over itself
    assert loaded(root) == 2


def test_a_step_with_a_register(object_environment: ObjectPlace) -> None:
    root = object_environment.url
    arrays = sample_arrays()
    write_checkpoint(root, arrays, world_size=5, register_from=2)
    assert [*verified(root)] == [1]
    with StoreSource(root, 1) as source:
        boxes = {"model.weight": Box(offset=(3, 1), shape=(4, 2))}
        found = read_tensors(source, ["model.weight", "model.mask"], boxes=boxes)
    assert found["model.weight"].tolist() == arrays["model.weight"][0][3:7, 1:3].tolist()
    assert found["model.mask"].tolist() == arrays["model.mask"][0].tolist()
    assert main(["verify", root, "--deep"]) == 0


@pytest.mark.parametrize(
    ("object_place", "rule"),
    [
        *itertools.product(["s3", "az"], PASSING),
        *itertools.product(["s3"], SIGNED),
        *(pytest.param("gs", rule, marks=pytest.mark.exhaustive) for rule in PASSING),
    ],
    ids=lambda each: each if isinstance(each, str) else each.fault.name,
    indirect=["object_place"],
)
def test_faults_that_pass_are_not_noticed(
    object_environment: ObjectPlace, proxy: FaultProxy, rule: HttpFaultRule
) -> None:
    root = object_environment.url
    for _ in range(2):  # once more over itself
        proxy.set(rule)
        saved(root, 1)
        proxy.set(rule)
        assert loaded(root) == 1


@MOSTLY
def test_a_lost_reply_to_any_request_of_a_save(
    object_environment: ObjectPlace, proxy: FaultProxy
) -> None:
    root = object_environment.url
    for number in itertools.count(1):
        proxy.set(HttpFaultRule(pattern="", fault=HttpFault.LOSE_REPLY, first=number))
        saved(root, number)
        hits = list(proxy.hits)
        assert loaded(root) == number
        if not hits:
            return


@MOSTLY
def test_a_server_lost_at_any_request_of_a_save_leaves_old_or_new(
    object_environment: ObjectPlace, proxy: FaultProxy
) -> None:
    root = object_environment.url
    saved(root, 1)
    for number in itertools.count(1):
        proxy.set(
            HttpFaultRule(
                pattern="", fault=HttpFault.REFUSE, first=number, times=10**9,
                status=403, code=DENIED[object_environment.kind],
            )
        )  # fmt: skip
        try:
            saved(root, number + 1)
        except CkptError as error:
            assert root in str(error)
            proxy.set()
            assert loaded(root) in (number, number + 1)
            assert loaded(root) == next(iter(verified(root)))
            saved(root, number + 1)  # the rest of the first try is no hindrance
            assert loaded(root) == number + 1
            assert committed_steps(root) == [*range(1, number + 2)]
        else:
            assert number > 5
            return


def test_bytes_that_change_on_their_way_back_are_noticed(
    object_environment: ObjectPlace, proxy: FaultProxy
) -> None:
    root = object_environment.url
    saved(root, 1)
    for pattern in (r"GET [^?]*pack", r"GET [^?]*index", r"GET [^?]*manifest"):
        proxy.set(HttpFaultRule(pattern=pattern, fault=HttpFault.FLIP_REPLY, times=10**9))
        with pytest.raises(CorruptError, match=root):
            loaded(root)
        assert proxy.hits
    proxy.set()
    assert loaded(root) == 1


def test_a_run_that_lost_the_fence_is_refused(object_environment: ObjectPlace) -> None:
    store = open_store(object_environment.url)
    fence.take(store, run="old", generation=2)
    fence.take(store, run="new", generation=1)
    with pytest.raises(FencedError):
        fence.take(store, run="old", generation=3)


def test_the_commands_take_such_a_root(
    object_environment: ObjectPlace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = object_environment.url
    saved(root, 1)
    saved(root, 2)
    assert main(["inspect", f"{root}/step-000000000001", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [1, 2]
    assert main(["verify", root, "--all", "--deep"]) == 0
    assert main(["diff", root, root, "--step-a", "1"]) == 1
    assert main(["reshard", root, f"{root}-again", "--mesh", "dp=2"]) == 0
    ckpt.save(f"{root}-model", {"model": torch.nn.Linear(3, 2)}, step=1)
    assert main(["convert", f"{root}-model", f"{root}-flat/model.safetensors"]) == 0
    assert main(["convert", f"{root}-flat/model.safetensors", f"file://{tmp_path}/own"]) == 0
    assert main(["convert", f"{tmp_path}/own", f"{root}-back", "--to", "holdfast"]) == 0
    assert committed_steps(f"{root}-back")
    assert main(["prune", root, "--keep-last", "1"]) == 0
    assert committed_steps(root) == [2]


JOB = """
import sys, torch, holdfast

@holdfast.resilient(
    checkpoint=holdfast.Checkpoints(sys.argv[1], every=3),
    batch=holdfast.Batch(microbatches=2, size=2),
)
def train(run):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(int(sys.argv[2])):
        for x in run.microbatches(torch.ones(64, 4)):
            run.backward(model(x).sum())
        run.step(optimizer)

train()
"""


@pytest.mark.slow
@pytest.mark.parametrize("object_place", ["az"], indirect=True)
def test_a_job_continues_from_its_checkpoint_there(
    object_environment: ObjectPlace, tmp_path: Path
) -> None:
    script, root = tmp_path / "job.py", object_environment.url
    script.write_text(JOB)
    done = subprocess.run(
        [*COMMAND, "run", "--nproc", "2", str(script), root, "3"],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        env={**os.environ, **IMPORTING_ONCE},
    )
    assert done.returncode == 0, done.stderr
    ran([sys.executable, script, root, "6"], check=True)  # by hand, on one rank
    assert committed_steps(root) == [3, 6]
    assert main(["verify", root, "--all", "--deep"]) == 0
