"""The objects that an Accelerator has prepared, under the names of a checkpoint.

The first of each kind has the name of the kind (``model``), the next ones a number
(``model_1``), as in the files of accelerate's own ``save_state``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def prepared_state(accelerator: Any) -> dict[str, Any]:
    """Return the models, inner optimizers, inner schedulers, scaler and registered objects."""
    state = dict(numbered("model", accelerator._models))
    state |= numbered("optimizer", (each.optimizer for each in accelerator._optimizers))
    state |= numbered("scheduler", (each.scheduler for each in accelerator._schedulers))
    state |= numbered("registered", accelerator._custom_objects)
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state


def numbered(kind: str, items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each item with its name."""
    for i, item in enumerate(items):
        yield (f"{kind}_{i}" if i else kind), item


def gives_buffers(accelerator: Any) -> bool:
    """Say whether models are in DDP that gives all ranks the buffers of rank 0.

    Accelerate keeps the models inside DDP, not DDP itself.
    """
    handler = accelerator.ddp_handler
    is_ddp = accelerator.distributed_type in ("MULTI_CPU", "MULTI_GPU")
    return is_ddp and (handler is None or bool(handler.broadcast_buffers))
