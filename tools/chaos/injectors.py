"""Which injector does which kind of fault."""

from __future__ import annotations

from collections.abc import Iterable

from tools.chaos.injector import Injector


def for_kinds(kinds: Iterable[str]) -> dict[str, Injector]:
    """Return an injector for each kind; kinds of one family share one."""
    raise NotImplementedError
