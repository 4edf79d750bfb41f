"""Bytes of each microbatch of a pass, given to all ranks."""

from __future__ import annotations

import torch

from holdfast.elastic import Run


def of_all_microbatches(run: Run, mine: list[bytes]) -> list[bytes]:
    """Return the bytes of every microbatch in order; of one without samples, none.

    ``mine`` are those of this rank's microbatches in the last pass; they end in no blank.
    Collective, between the passes.
    """
    longest = int(run.reduce([len(data) for data in mine], "max"))
    blank = ord(" ")
    rows = [torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8) for data in mine]
    return [row.numpy().tobytes().rstrip() for row in run.gather(rows, fill=blank)]
