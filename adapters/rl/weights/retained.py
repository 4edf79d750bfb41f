"""The policy's previous versions, as a part of the tracked state.

In memory every version is a snapshot, and ``keep`` of them exist. A checkpoint is a single one:
after a cold start, samples bound to an older version could not be continued. So where a job has
checkpoints, its snapshots carry the older versions that may still be asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from holdfast.adapters.rl.policy.policy import local, reshard
from holdfast.adapters.rl.weights.places import slot_of

_EMPTY = -1


class Retained(nn.Module):
    """The versions before the present one, each in its own slot.

    ``policies`` has one policy per retained version, sharded like the policy itself. ``versions``
    [slots], int64, maps a slot to its version; -1: none yet.
    """

    versions: Tensor

    def __init__(self, policies: Sequence[nn.Module]) -> None:
        super().__init__()
        for slot, policy in enumerate(policies):
            self.add_module(str(slot), policy)
        self.count = len(policies)
        self.register_buffer("versions", torch.full((self.count,), _EMPTY))
        self.requires_grad_(False)

    @torch.no_grad()
    def keep(self, policy: nn.Module, *, version: int) -> None:
        """Copy ``policy``, which is of ``version``, over the oldest one.

        Must not be called while a snapshot is being copied.
        """
        slot = slot_of(version, retained=self.count)
        reshard(policy)
        pairs = zip(self.get_submodule(str(slot)).parameters(), policy.parameters(), strict=True)
        for kept, current in pairs:
            local(kept).copy_(local(current))
        self.versions[slot] = version
