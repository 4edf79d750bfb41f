"""Names of tensors without the parts that wrappers add."""

from __future__ import annotations

WRAPPER_ATTRIBUTES = frozenset(
    {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_ddp_module"}
)
"""Attributes under which a wrapper keeps the module it wraps: never part of a name.

They come from ``torch.compile``, activation checkpointing and FSDP1. ``module`` (DDP, DataParallel)
is also an ordinary name, so ``holdfast.ckpt.state.flatten`` drops it only for those wrapper types.
"""


def clean(name: str) -> str:
    """Return a dotted name without the attributes that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_ATTRIBUTES)


def join(*parts: str) -> str:
    """Join the non-empty parts with dots."""
    return ".".join(part for part in parts if part)
