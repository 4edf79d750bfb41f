"""Failure domains inside failure domains. Pure."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1 << 15)
def domains_of(label: str) -> tuple[str, ...]:
    """Return the failure domains that a label names, the widest first; none for an empty label.

    ``row-3/rack-7`` names ``row-3``, and in it ``row-3/rack-7``.
    """
    parts = [part for part in label.split("/") if part]
    return tuple(["/".join(parts[: depth + 1]) for depth in range(len(parts))])
