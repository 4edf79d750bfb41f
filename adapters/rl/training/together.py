"""The ranks of a run that trains one policy of several: rank 0 waits for other runs, and tells all.

Another run may be away for hours. So nobody waits for it inside a collective: rank 0 says again and
again that it is still waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast import elastic
from holdfast.adapters.rl.cast.part import CastPart
from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.policy.team import prefix_of
from holdfast.adapters.rl.training.assessment import Assessment
from holdfast.adapters.rl.weights.setup import PolicyMaker
from holdfast.ckpt.errors import CkptError

_TURN_S: Final = 1.0
_PAUSE_S: Final = 0.05


class Cast:
    """The ranks of one generation; ``part`` is rank 0's, None on the others."""

    def __init__(
        self, run: elastic.Run, config: RLConfig, makers: Mapping[str, PolicyMaker]
    ) -> None:
        self._run, self._config, self._makers = run, config, makers
        self.part: CastPart | None = None

    def await_groups(self, step: int) -> None:
        """Wait until the groups of ``step`` are there; collective."""
        self._until(lambda part: part.ready(step))

    def await_end(self) -> None:
        """Wait until the lead has ended, unless this run is the lead; collective."""
        if not self._config.leads:
            self._until(lambda part: part.ended())

    def evaluate(
        self, assessment: Assessment, policies: Mapping[str, nn.Module]
    ) -> dict[str, float]:
        """Return the evaluation of all policies after the completed steps; collective.

        Only the lead evaluates. It waits for the others' version of that step.
        """
        if not self._config.leads:
            return {}
        step, noted = self._run.completed, None
        value = torch.full((1,), torch.nan, dtype=torch.float64)
        if self.part is not None and (noted := self.part.log.noted(step)) is not None:
            value.fill_(noted["held_out"])
        from_leader(self._run, value)
        if not value.isnan():
            return {"held_out": value.item()}
        weights = self._weights(step)
        found = assessment.evaluate(self._run, policies, weights)
        if self.part is not None and all(map(math.isfinite, found.values())):
            self.part.log.note(step, found)
        return found

    def close(self) -> None:
        """End the part of rank 0."""
        if self.part is not None:
            self.part.close()

    # -- inside ----------------------------------------------------------------------------------

    def _weights(self, version: int) -> dict[str, Tensor]:
        """Return the tensors of a version of all policies of other runs; collective."""
        pulled: dict[str, Tensor] = {}

        def pull(part: CastPart) -> bool:
            if not part.have(version):
                return False
            try:
                pulled.update(part.others.pull(version))
            except CkptError:  # that run changes just now
                time.sleep(_PAUSE_S)
                return False
            return True

        self._until(pull)
        found: dict[str, Tensor] = {}
        for policy in sorted(self._config.elsewhere):
            for fqn, parameter in self._makers[policy].build().named_parameters():
                name, tensor = f"{prefix_of(policy)}{fqn}", parameter.detach()
                if pulled:
                    tensor.copy_(pulled[name])
                from_leader(self._run, tensor)
                found[name] = tensor
        return found

    def _until(self, ready: Callable[[CastPart], bool]) -> None:
        run, is_ready = self._run, torch.zeros(1)
        while not is_ready.item():
            run.check()
            if self.part is not None:
                is_ready.fill_(float(self._turn(self.part, ready)))
            from_leader(run, is_ready)

    def _turn(self, part: CastPart, ready: Callable[[CastPart], bool]) -> bool:
        until_s = time.monotonic() + _TURN_S
        while not ready(part):
            self._run.check()
            if time.monotonic() > until_s:
                return False
        return True


def from_leader(run: elastic.Run, tensor: Tensor) -> None:
    """Replace ``tensor`` by that of rank 0, which is the first along each axis; collective."""
    for axis in range(run.mesh.ndim):
        dist.broadcast(tensor, group=run.mesh.get_group(axis), group_src=0)
