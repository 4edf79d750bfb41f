"""The entries of tracked state by dotted name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.ckpt.state.kinds.model_parts import ModelParts


def leaves_of(state: Any, *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the objects in nested mappings and sequences, with their dotted names."""
    items = state.items() if isinstance(state, Mapping) else enumerate(state)
    for key, value in items:
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping | list | tuple) and not isinstance(value, ModelParts):
            yield from leaves_of(value, prefix=name)
        else:
            yield name, value
