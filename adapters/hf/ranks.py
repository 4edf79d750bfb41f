"""The rank as accelerate and transformers see it: who writes files, and no collectives.

Ranks run different numbers of microbatches, so nothing of these libraries may wait for the other
ranks in one. They are told that there is one process. Only its index is that of the rank, which
decides who saves and logs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import PartialState

from holdfast.elastic import ConfigError

NOT_THE_LEADER = 1
"""Index of a process that took no part in training: it writes nothing."""


def check_alone(trainer: Any) -> None:
    """Raise ``ConfigError`` if accelerate has formed process groups, or if the device is no CPU."""
    if trainer.accelerator.num_processes > 1 or "LOCAL_RANK" in os.environ:
        raise ConfigError(
            "resilient_trainer: accelerate has formed process groups, as under torchrun or "
            "accelerate launch: start the script by `python` or `holdfast run`, which form them "
            "anew after every change"
        )
    if trainer.args.device.type != "cpu":
        raise ConfigError(
            f"resilient_trainer: the Trainer is on {trainer.args.device}; this adapter has run on "
            "the CPU only: give use_cpu=True, or write the loop with run.device"
        )


def stand_at(trainer: Any, index: int) -> None:
    """Let the libraries know this process by ``index``; 0 is the one that writes."""
    for state in (PartialState(), trainer.accelerator.state):
        state.process_index = state.local_process_index = index
    trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = index == 0


@contextmanager
def as_only_process(trainer: Any) -> Iterator[None]:
    """Let this process be number 0: TRL takes its own rows out of what it has gathered."""
    index = trainer.accelerator.process_index
    states = (PartialState(), trainer.accelerator.state)
    for state in states:
        state.process_index = 0
    try:
        yield
    finally:
        for state in states:
            state.process_index = index
