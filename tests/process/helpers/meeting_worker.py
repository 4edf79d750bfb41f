"""A worker under torchrun that runs a collective with the others, reports it, and waits."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist


def main() -> None:
    """Meet, tell, wait; a worker whose agent is gone ends."""
    parent = os.getppid()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    report = {
        "pid": os.getpid(),
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "sum": int(total),
        "agent": parent,
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    }
    with Path(os.environ["HOLDFAST_TEST_LOG"]).open("ab", buffering=0) as log:
        log.write(msgspec.json.encode(report) + b"\n")
    while not Path(os.environ["HOLDFAST_TEST_END"]).exists() and os.getppid() == parent:
        time.sleep(0.02)


if __name__ == "__main__":
    main()
