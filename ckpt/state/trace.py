"""Where a flatten found what: enough to see later that it would find the same again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


@dataclass(slots=True, kw_only=True)
class TracedTree:
    """A tree of state: what gives it, and where in it something other than plain values was."""

    name: str
    take: Callable[[], Any]
    paths: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Trace:
    """The route of one ``flatten``.

    ``holders`` are the mappings and sequences it went into, the state itself first; ``values``
    the plain ones in them (name, holder, key); ``per_rank`` is of the same, by name. ``first`` is
    the name each tensor (by id) has. ``is_repeatable`` is false where a second pass
    over the same objects gives other tensors.
    """

    holders: list[Any] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    sharded: list[FSDPModule] = field(default_factory=list)
    values: list[tuple[str, Any, Any]] = field(default_factory=list)
    per_rank: list[tuple[str, Any]] = field(default_factory=list)
    trees: list[TracedTree] = field(default_factory=list)
    first: dict[int, str] = field(default_factory=dict)
    is_repeatable: bool = True
