"""Which injector does which kind of fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from holdfast.tools.chaos.faults import families
from holdfast.tools.chaos.faults.injector import Injector

INJECTORS: Final[dict[str, Callable[[], Injector]]] = {
    kind: family.make for family in families() for kind in family.kinds
}
"""Kind → what makes the injector that does it in a world of real processes."""


def for_kinds(kinds: Iterable[str]) -> dict[str, Injector]:
    """Return an injector for each kind; kinds of one family share one.

    Raises ``KeyError`` for a kind that none does.
    """
    made: dict[Callable[[], Injector], Injector] = {}
    found: dict[str, Injector] = {}
    for kind in sorted(set(kinds)):
        make = INJECTORS[kind]
        if make not in made:
            made[make] = make()
        found[kind] = made[make]
    return found
