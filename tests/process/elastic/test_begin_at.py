"""A run that goes on from the steps of somebody else, whose state its script has loaded."""

from __future__ import annotations

from pathlib import Path

from document_blocks import run_script

SCRIPT = """
import sys
import torch
import holdfast
from holdfast.elastic import session_of

BEGIN, END = {begin}, {end}


@holdfast.resilient(batch=holdfast.Batch(microbatches=2), snapshots=holdfast.Snapshots(parity=0))
def train(run):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if BEGIN:
        model.load_state_dict(torch.load("model.pt"))
        optimizer.load_state_dict(torch.load("optimizer.pt"))
    run.track(model=model, optimizer=optimizer)
    data = torch.randn(10, 4, generator=torch.Generator().manual_seed(3))
    loader = run.loader(data, batch=4)
    session_of(run).begin_at(BEGIN, loader)
    for step in run.steps(END):
        for x in run.microbatches(loader):
            run.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        run.step(optimizer)
    if END == 5:
        try:
            session_of(run).begin_at(2)
        except holdfast.elastic.ConfigError as error:
            print(error)
    torch.save(model.state_dict(), "model.pt")
    torch.save(optimizer.state_dict(), "optimizer.pt")
    print(run.completed, holdfast.state_hash(model.state_dict()))


train()
"""


def last_line(folder: Path, *, begin: int, end: int) -> str:
    return run_script(folder, SCRIPT.format(begin=begin, end=end)).splitlines()[-1]


def test_it_goes_on_with_their_samples_and_draws(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    wanted = last_line(whole, begin=0, end=8)
    said = run_script(parts, SCRIPT.format(begin=0, end=5))
    assert "begin_at(2): the run has 5 complete steps already" in said
    assert last_line(parts, begin=5, end=8) == wanted
    assert wanted.startswith("8 ")
