"""Decorators that recompute a pure function of a view only for changed parts. Pure.

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
    """Compute a function in each new view for which ``when`` is true.

    The result is the same as later, but it is ready when a plan needs it.
    """

    def of(ask: Callable[[JobView], _T]) -> Callable[[JobView], _T]:
        ask_ahead(ask, when=when)
        return ask

    return of


def once(find: Callable[[JobView], _T]) -> Callable[[JobView], _T]:
    """Compute a pure function once for each view; callers must not change its result."""
    name = _name(find)

    @wraps(find)
    def found(view: JobView) -> _T:
        return view.findings.here(name, lambda: find(view))

    return found


def while_same(
    parts: Callable[[JobView], Parts],
) -> Callable[[Callable[..., _T]], Callable[[JobView], _T]]:
    """Recompute a pure function of a view's ``parts`` only if one is another object."""

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
    """Apply a pure function of a node's record and of ``parts`` to all nodes of a view.

    The result maps nodes, in their order, to the function's results; None is left out. The function
    runs again only for nodes whose record changed, and for all nodes if a part is another object.
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
    """Like `by_node`, for a function that takes many records at once and returns results by node.

    For functions so simple that a call for each node would cost more than the computation.
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
