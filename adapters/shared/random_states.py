"""The states of a process's global random generators: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalRandomness:
    """The states of all global generators at one time; ``cuda`` is None without such a device.

    They are kept as the libraries give them, because they are taken before every batch.
    """

    python: tuple[Any, ...]
    numpy: Mapping[str, Any]
    torch_cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def taken(cls, device: torch.device) -> GlobalRandomness:
        """Return the states of now; ``device`` is the one of this process."""
        numpy: Any = np.random.get_state(legacy=False)
        return cls(
            python=random.getstate(),
            numpy=numpy,
            torch_cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def put_back(self, device: torch.device) -> None:
        """Give the generators these states; that of ``device`` only if one was taken."""
        random.setstate(self.python)
        np.random.set_state(dict(self.numpy))
        torch.set_rng_state(self.torch_cpu)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)

    def saved(self) -> dict[str, Any]:
        """Return the states as a tree of arrays, tensors and plain values."""
        version, words, spare = self.python
        found = {
            "python": {"version": version, "words": np.array(words, np.uint32), "spare": spare},
            "numpy": dict(self.numpy),
            "torch": self.torch_cpu,
        }
        return found if self.cuda is None else {**found, "cuda": self.cuda}

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> GlobalRandomness:
        """Return the states that `saved` described."""
        python = saved["python"]
        return cls(
            python=(python["version"], tuple(python["words"].tolist()), python["spare"]),
            numpy=saved["numpy"],
            torch_cpu=saved["torch"],
            cuda=saved.get("cuda"),
        )


def seed_for(saved: Mapping[str, Any], rank: int) -> int:
    """Return a seed for a rank that has no saved state: it follows from rank 0's and the number."""
    text = saved["torch"].numpy().tobytes() + rank.to_bytes(8, "little")
    return int.from_bytes(sha256(text).digest()[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seed all global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
