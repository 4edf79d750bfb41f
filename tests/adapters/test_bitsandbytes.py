"""A frozen base that bitsandbytes has quantised: kept, built again, and never half restored."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PROGRAM = """
import sys, tempfile
import torch
import bitsandbytes as bnb
from torch import nn
from holdfast import ckpt

def build(seed, double):
    torch.manual_seed(seed)
    layer = bnb.nn.Linear4bit(
        64, 64, quant_type="nf4", compute_dtype=torch.float32, compress_statistics=double
    )
    model = nn.Sequential(layer, nn.Linear(64, 4)).to("cpu")
    layer.requires_grad_(False)
    return model

def tried(saved, other, hold):
    root = tempfile.mkdtemp()
    ckpt.save(root, {"model": hold(saved)}, step=1)
    ckpt.load(root, {"model": hold(other)})
    x = torch.randn(8, 64)
    return torch.equal(saved(x), other(x))

plain, again = (lambda module: module), ckpt.Rebuilt
for double in (False, True):
    first = build(0, double)
    with torch.no_grad():
        first[1].weight.add_(1)
    print("same", tried(first, build(0, double), plain), tried(first, build(0, double), again))
    for hold in (plain, again):
        try:
            print("other", tried(first, build(1, double), hold))
        except ckpt.CkptError as error:
            print("other refused", str(error).replace(chr(10), " "))
"""


def test_a_quantised_base_is_restored_or_refused(bitsandbytes: Run, tmp_path: Path) -> None:
    program = tmp_path / "quantised.py"
    program.write_text(PROGRAM)
    lines = bitsandbytes("python", str(program)).splitlines()
    simple, single, rebuilt, same, double, rebuilt_too = lines
    assert simple == same == "same True True"
    assert single == "other True", "its scales are filled in place"
    assert "model.0.weight.quant_state.bitsandbytes__nf4" in double, "no tensor to fill"
    for refused in (rebuilt, rebuilt_too):
        assert "model.0.weight was built as uint8" in refused
