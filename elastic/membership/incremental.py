"""Decorators that make a pure function of a view look again only at what changed. Pure.

`holdfast.elastic.membership.findings` keeps the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from holdfast.elastic.membership.findings import Parts, ask_ahead
from holdfast.elastic.membership.view import JobView

_T = TypeVar("_T")


def ahead(
    when: Callable[[JobView], bool] = lambda _: True,
) -> Callable[[Callable[[JobView], _T]], Callable[[JobView], _T]]:
    """Have a question answered in each view as it is made, where ``when`` is so of it.

    The answer is the same as later; it is at hand when a plan asks for it.
    """

    def of(ask: Callable[[JobView], _T]) -> Callable[[JobView], _T]:
        ask_ahead(ask, when=when)
        return ask

    return of


def once(find: Callable[[JobView], _T]) -> Callable[[JobView], _T]:
    """Have a pure function of a view look at each view once; what it returns is not changed."""
    name = _name(find)

    @wraps(find)
    def found(view: JobView) -> _T:
        return view.findings.here(name, lambda: find(view))

    return found


def while_same(
    parts: Callable[[JobView], Parts],
) -> Callable[[Callable[..., _T]], Callable[[JobView], _T]]:
    """Have a pure function of a view's ``parts`` look again only where one is another object."""

    def of(find: Callable[..., _T]) -> Callable[[JobView], _T]:
        name = _name(find)

        @wraps(find)
        def found(view: JobView) -> _T:
            return view.findings.whole(name, parts(view), find)

        return found

    return of


def by_node(
    parts: Callable[[JobView], Parts] = lambda _: (),
) -> Callable[[Callable[..., _T | None]], Callable[[JobView], dict[str, _T]]]:
    """Have a pure function of a node's record, and of ``parts``, look at all nodes of a view.

    The result maps nodes, in their order, to what it says of them; None is left out. Only nodes
    whose record changed are looked at again, and all where a part is another object.
    """

    def of(find: Callable[..., _T | None]) -> Callable[[JobView], dict[str, _T]]:
        name = _name(find)

        @wraps(find)
        def found(view: JobView) -> dict[str, _T]:
            return view.findings.by_node(name, parts(view), find, view.nodes)

        return found

    return of


def by_nodes(
    parts: Callable[[JobView], Parts] = lambda _: (),
) -> Callable[[Callable[..., dict[str, _T]]], Callable[[JobView], dict[str, _T]]]:
    """As `by_node`, for a function of many records at once: it returns what it says, by node.

    For a question so simple that to call it for each node would cost more than the answer.
    """

    def of(find: Callable[..., dict[str, _T]]) -> Callable[[JobView], dict[str, _T]]:
        name = _name(find)

        @wraps(find)
        def found(view: JobView) -> dict[str, _T]:
            return view.findings.by_nodes(name, parts(view), find, view.nodes)

        return found

    return of


def _name(find: Callable[..., Any]) -> str:
    return f"{find.__module__}.{find.__qualname__}"
