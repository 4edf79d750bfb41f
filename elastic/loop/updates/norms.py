"""torch's own norms of gradients, where they are not those of the whole model."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from holdfast.ckpt.torch_private import CLIPS_BY, NORM_OF_ALL
from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.shards import is_reduced_by_fsdp
from holdfast.elastic.loop.updates.interposed import Interposed
from holdfast.elastic.loop.user_code import user_line


def refuse_partial_norms(interposed: Interposed, *, stages: int, exact: Exact) -> None:
    """Refuse ``torch.nn.utils.clip_grad_norm_`` where `Run.clip_grad_norm_` differs from it.

    With several pipeline ``stages`` torch's covers this rank's gradients alone. Over the shards of
    FSDP2 it adds in an order that depends on the number of ranks, which ``exact`` excludes. Calls
    raise ``ConfigError``.
    """

    def look(tensors: torch.Tensor | Iterable[torch.Tensor], *_: object, **__: object) -> None:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if exact and any(map(is_reduced_by_fsdp, given)):
            raise ConfigError(
                f"torch's norm of gradients at {user_line()}: over shards of fully_shard its last "
                "bits depend on the number of ranks, and exact is set: call "
                "run.clip_grad_norm_(parameters, max_norm), which also returns the norm"
            )

    def look_at_stage(tensors: Iterable[torch.Tensor], *_: object, **__: object) -> None:
        if stages > 1:
            raise ConfigError(
                f"torch's clip_grad_norm_ at {user_line()} knows this rank's pipeline stages "
                "alone, so every stage would be scaled by another norm: call "
                "run.clip_grad_norm_(parameters, max_norm), which covers all stages"
            )
        look(tensors)

    interposed.before(*CLIPS_BY, look_at_stage)
    interposed.before(*NORM_OF_ALL, look)
