"""A training loop of the benchmark: it counts its steps in a file that others map."""

from __future__ import annotations

import mmap
import os
import struct
import sys
from typing import Final

import torch
from torch import nn

COUNT: Final = struct.Struct("<Q")
_WIDTH, _ROWS = 256, 32


def main(path: str) -> None:
    """Train on one thread until the process is ended."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randn(_ROWS, _WIDTH)
    file = os.open(path, os.O_RDWR)
    counter = mmap.mmap(file, COUNT.size)
    steps = 0
    while True:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        steps += 1
        COUNT.pack_into(counter, 0, steps)


if __name__ == "__main__":
    main(sys.argv[1])
