"""The process's random generators as one Stateful object, kept per rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from holdfast.ckpt.state.flatten import PerRank


class RandomStates:
    """State of torch's (CPU and current CUDA device), Python's and numpy's global generators.

    Add it to a state to have every rank continue its own random streams; ranks beyond the saved
    world keep the streams they have.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states; small, plain and per rank."""
        kind, keys, *rest = np.random.get_state(legacy=True)
        states: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": (kind, np.asarray(keys).tolist(), *rest),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states["cuda"] = torch.cuda.get_rng_state()
        return {name: PerRank(value) for name, value in states.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators; a CUDA state is left out where there is no device."""
        torch.set_rng_state(state_dict["torch"])
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])
