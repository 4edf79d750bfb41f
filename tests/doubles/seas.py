"""Short ways to make the records of a sea."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.elastic.sea.records import (
    DealtData,
    Entered,
    Founded,
    Left,
    Merged,
    Parameter,
    Work,
    agreed,
)
from holdfast.elastic.sea.settings import Islands
from holdfast.elastic.sea.view import View


def digest(text: object) -> str:
    """Return a digest that no other text has."""
    return str(text).encode().hex().rjust(16, "0")[-64:]


def founded(islands: Islands, *, dealt: DealtData | None = None) -> View:
    """Return the view of a sea that was just founded; ``dealt`` is the data that it deals."""
    shapes = (("weight", (2, 3)), ("bias", (3,)))
    return View().after(
        Founded(
            number=0,
            settings=agreed(islands),
            parameters=tuple(Parameter(name=name, shape=shape) for name, shape in shapes),
            digest=digest("first"),
            dealt=dealt,
        )
    )


def entered(view: View, *names: str, weight: int = 10) -> View:
    """Return the view after islands entered with the sea's weights."""
    for name in names:
        number = view.length
        view = view.after(
            Entered(number=number, island=name, tide=view.tide, weight=weight, lineage=number)
        )
    return view


def left(view: View, name: str) -> View:
    """Return the view after an island left at the end of its run."""
    return view.after(Left(number=view.length, island=name, why="done"))


def work(view: View, name: str, **changes: Any) -> Work:
    """Return a work of an island that has adopted all merges."""
    island = view.members.get(name) or view.former[name]
    base = view.merges(view.portion)
    made = Work(
        island=name,
        lineage=island.lineage,
        tide=view.tide,
        portion=view.portion,
        weight=10,
        digest=digest(f"{name}{view.tide}"),
        nbytes=130,
        base=base,
        state=digest(f"state{view.portion}.{base}"),
    )
    return msgspec.structs.replace(made, **changes)


def merged(view: View, *works: Work, **changes: Any) -> Merged:
    """Return the merge of works, as `decide` makes it."""
    parts = tuple(work.part for work in sorted(works, key=lambda each: each.island))
    made = Merged(
        number=view.length,
        tide=view.tide,
        portion=view.portion,
        parts=parts,
        whole=view.whole(parts),
    )
    return msgspec.structs.replace(made, **changes)
