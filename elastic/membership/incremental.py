"""What is found of a view once, and taken over by the next one as far as it still holds. Pure.

Views of a large world follow each other by the change of a few nodes. What is asked of every node
is asked anew only of those that changed, and what follows from parts of a view stays while these
are the very same objects. A question is a function of what it names and of nothing else, so what
is taken over is what would be found anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    from holdfast.elastic.membership.view import JobView

_T = TypeVar("_T")

Parts: TypeAlias = tuple[Any, ...]
"""What an answer depends on; the same objects, the same answer."""


class _Whole(NamedTuple):
    parts: Parts
    answer: Any


class _ByNode(NamedTuple):
    parts: Parts
    answers: dict[str, Any]
    changed: Set[str]
    """The nodes of which another record is known since."""


class Findings:
    """The answers found of one view, and those of the views before it."""

    __slots__ = ("_by_node", "_here", "_whole")

    def __init__(self) -> None:
        self._here: dict[str, Any] = {}
        self._whole: dict[str, _Whole] = {}
        self._by_node: dict[str, _ByNode] = {}

    def inherit(self, before: Findings, *, changed: Set[str]) -> None:
        """Take over what was found of a view of which the nodes ``changed`` are others now."""
        self._whole = dict(before._whole)
        self._by_node = {
            name: found._replace(changed=found.changed | changed) if changed else found
            for name, found in before._by_node.items()
        }

    def here(self, name: str, find: Callable[[], _T]) -> _T:
        """Return what ``find`` found of this view."""
        if name not in self._here:
            self._here[name] = find()
        return cast("_T", self._here[name])

    def whole(self, name: str, parts: Parts, find: Callable[..., _T]) -> _T:
        """Return what ``find`` says of the parts."""
        known = self._whole.get(name)
        if known is None or not _same(known.parts, parts):
            known = self._whole[name] = _Whole(parts, find(*parts))
        return cast("_T", known.answer)

    def by_node(
        self, name: str, parts: Parts, find: Callable[..., _T | None], nodes: Mapping[str, Any]
    ) -> dict[str, _T]:
        """Return what ``find`` says of each node and the parts, where it says anything."""

        def of_each(records: Iterable[Any], *parts: Any) -> dict[str, _T]:
            return {
                record.node: answer
                for record in records
                if (answer := find(record, *parts)) is not None
            }

        return self.by_nodes(name, parts, of_each, nodes)

    def by_nodes(
        self, name: str, parts: Parts, find: Callable[..., dict[str, _T]], nodes: Mapping[str, Any]
    ) -> dict[str, _T]:
        """Return what ``find`` says of many nodes at once, and the parts, by node."""
        known = self._by_node.get(name)
        if known is None or not _same(known.parts, parts) or len(known.changed) > len(nodes):
            answers = find(nodes.values(), *parts)
        elif known.changed:
            answers = _renewed(known, find, nodes)
        else:
            return known.answers
        self._by_node[name] = _ByNode(parts, answers, frozenset())
        return answers


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


def _renewed(
    known: _ByNode, find: Callable[..., dict[str, Any]], nodes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the answers with those of the changed nodes; the very same where they are the same."""
    before, changed = known.answers, known.changed
    said = find([nodes[node] for node in changed if node in nodes], *known.parts)
    removed = [node for node in before.keys() & changed if node not in said] if before else ()
    added = not said.keys() <= before.keys()
    if not (added or removed) and _as_said(said, before):
        return before
    answers = {**before, **said}
    for node in removed:
        del answers[node]
    return {node: answers[node] for node in sorted(answers)} if added else answers


def _as_said(said: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Say whether all answers are those of before; only words are compared, and other things told
    by being the very same."""
    return all(
        now is before[node] or (isinstance(now, str) and now == before[node])
        for node, now in said.items()
    )


def _same(parts: Parts, others: Parts) -> bool:
    return all(one is other for one, other in zip(parts, others, strict=True))


def _name(find: Callable[..., Any]) -> str:
    return f"{find.__module__}.{find.__qualname__}"
