"""The model that islands and DDP train in the benchmark: a byte-level GPT on Python's library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT: Final = 64
"""Tokens of a sample."""

WIDTH: Final = 64
_HEADS, _BLOCKS, _VOCABULARY = 4, 4, 256
RATE: Final = 2e-3
"""The optimizer's rate where speed and bytes are measured."""

_TRAINED, _HELD_OUT = slice(80), slice(80, 100)
_LOOKS: Final = 128


class Windows:
    """Bytes of the standard library: sample ``i`` is a window of `CONTEXT` of them, and the next.

    They are int64, of shape (CONTEXT + 1,), from the ``files`` of all in the order of their names.
    """

    def __init__(self, files: slice = _TRAINED) -> None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[files]
        data = bytearray(b"".join(path.read_bytes() for path in paths))
        self._bytes = torch.frombuffer(data, dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // CONTEXT

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._bytes[number * CONTEXT : (number + 1) * CONTEXT + 1].long()


class SmallGPT(nn.Module):
    """A GPT of 0.24 million parameters; called with windows, it returns the mean loss of a byte.

    Of more ``blocks`` than four it has more parameters, 0.05 million each; of a larger ``width``
    about as many more as its square.
    """

    def __init__(self, *, blocks: int = _BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, _HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, _VOCABULARY)
        later = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        self.register_buffer("later", later, persistent=False)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each byte from those before it."""
        found = self.token(windows[:, :-1]) + self.place.weight
        for block in self.blocks:
            found = block(found, src_mask=self.later)
        return F.cross_entropy(self.head(found).flatten(0, 1), windows[:, 1:].flatten())


def learner(
    seed: int, *, rate: float = RATE, width: int = WIDTH
) -> tuple[SmallGPT, torch.optim.Optimizer]:
    """Return the model, the same for equal seeds, and its optimizer; training has one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = SmallGPT(width=width)
    return model, torch.optim.AdamW(model.parameters(), lr=rate)


def parameters_of(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(each.numel() for each in model.parameters())


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    """Return the mean loss on text that no way trains on: the measure that they share."""
    data = Windows(_HELD_OUT)
    stride = len(data) // _LOOKS
    return float(model(torch.stack([data[number * stride] for number in range(_LOOKS)])))
