"""Collectives over all ranks of torch.distributed: exchange JSON, agree on failure."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from holdfast.ckpt.errors import CkptError, HoldfastError, code_of, from_peer


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An error on a rank."""

    code: str
    message: str


class RankWorld:
    """The default process group, or a world of one if there is none."""

    def __init__(self) -> None:
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order, decoded from JSON. Collective."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
        device = torch.device("cpu")
        if (kind := device_kind(dist.get_backend_config())) != "cpu":
            device = torch.device(kind, torch.accelerator.current_device_index())
        size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size)
        lengths = [int(n.item()) for n in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        padded[: data.numel()] = data.to(device)
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(everyone, padded)
        return [
            msgspec.json.decode(part[:length].cpu().numpy().tobytes())
            for part, length in zip(everyone, lengths, strict=True)
        ]

    def agreed(self) -> Agreed:
        """Return a context in which a failure of one rank is raised on every rank. Collective."""
        return Agreed(self)


def device_kind(config: str) -> str:
    """Return the kind of device whose tensors a group exchanges: the CPU if it serves that.

    ``config`` names its backends, as ``cpu:gloo,cuda:nccl``.
    """
    kinds = [each.partition(":")[0] for each in config.split(",")]
    return "cpu" if "cpu" in kinds else kinds[0]


class Agreed:
    """Ends when every rank has ended it; raises on all ranks an error of one."""

    def __init__(self, world: RankWorld) -> None:
        self._world = world

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # an interrupt: this process ends, and the others notice
        failure = RankFailure(code=code_of(error), message=_text_of(error)) if error else None
        everyone = self._world.gather(failure)
        if error is not None:
            return
        for rank, found in enumerate(everyone):
            if found is not None:
                raise _error(rank, msgspec.convert(found, RankFailure))


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"


def _error(rank: int, failure: RankFailure) -> CkptError:
    return from_peer(failure.code, f"rank {rank}: {failure.message}")
