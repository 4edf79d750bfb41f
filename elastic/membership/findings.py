"""Cached answers about one view, and the ones that the next view takes over. Pure.

Successive views of a large world differ in a few nodes. A function of every node runs again only
for nodes that changed, and the result of a function of parts of a view stays while the parts are
the same objects. Each function depends only on its declared inputs, so a cached result equals a new
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

_T = TypeVar("_T")

Parts: TypeAlias = tuple[Any, ...]
"""The inputs of an answer; the same objects give the same answer."""


class _Whole(NamedTuple):
    parts: Parts
    answer: Any


class _ByNode(NamedTuple):
    parts: Parts
    answers: dict[str, Any]
    changed: Set[str]
    """The nodes whose record has changed since."""


_ahead: list[tuple[Callable[[Any], bool], Callable[[Any], object]]] = []


def ask_ahead(ask: Callable[[Any], object], *, when: Callable[[Any], bool]) -> None:
    """Register a function to be computed in every new view for which ``when`` is true."""
    _ahead.append((when, ask))


def answer_ahead(view: Any) -> None:
    """Compute the functions of `ask_ahead` in a view that was just made from the one before.

    Few nodes changed between the two, so this is cheap now; for all nodes at once, at the time of a
    plan, it would be expensive.
    """
    for when, ask in _ahead:
        if when(view):
            ask(view)


class Findings:
    """The cached answers about one view, and those of the views before it."""

    __slots__ = ("_by_node", "_here", "_whole")

    def __init__(self) -> None:
        self._here: dict[str, Any] = {}
        self._whole: dict[str, _Whole] = {}
        self._by_node: dict[str, _ByNode] = {}

    def inherit_whole(self, before: Findings) -> None:
        """Take over the answers of an earlier view that are of no single node."""
        self._whole = dict(before._whole)

    def inherit(self, before: Findings, *, changed: Set[str], nodes: int) -> None:
        """Take over the answers of an earlier view; the records of the nodes ``changed`` differ.

        Answers that nobody asked for while more records changed than there are ``nodes`` now are
        dropped: they would be found anew, and nodes with ever new names would never be forgotten.
        """
        self._whole = dict(before._whole)
        self._by_node = {
            name: found._replace(changed=found.changed | changed) if changed else found
            for name, found in before._by_node.items()
            if len(found.changed) <= nodes
        }

    def here(self, name: str, find: Callable[[], _T]) -> _T:
        """Return the result of ``find`` for this view; compute it once."""
        if name not in self._here:
            self._here[name] = find()
        return cast("_T", self._here[name])

    def whole(self, name: str, parts: Parts, find: Callable[..., _T]) -> _T:
        """Return the result of ``find`` for the parts."""
        known = self._whole.get(name)
        if known is None or not _same(known.parts, parts):
            known = self._whole[name] = _Whole(parts, find(*parts))
        return cast("_T", known.answer)

    def by_node(
        self, name: str, parts: Parts, find: Callable[..., _T | None], nodes: Mapping[str, Any]
    ) -> dict[str, _T]:
        """Return the results of ``find`` for each node and the parts, without None."""

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
        """Return the results by node of ``find``, which takes many nodes at once and the parts."""
        known = self._by_node.get(name)
        if known is None or not _same(known.parts, parts) or len(known.changed) > len(nodes):
            answers = find(nodes.values(), *parts)
        elif known.changed:
            answers = _renewed(known, find, nodes)
        else:
            return known.answers
        self._by_node[name] = _ByNode(parts, answers, frozenset())
        return answers


def _renewed(
    known: _ByNode, find: Callable[..., dict[str, Any]], nodes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the answers, updated for the changed nodes; the same object if none differs."""
    before, changed = known.answers, known.changed
    found = find([nodes[node] for node in changed if node in nodes], *known.parts)
    removed = [node for node in before.keys() & changed if node not in found] if before else ()
    added = not found.keys() <= before.keys()
    if not (added or removed) and _unchanged(found, before):
        return before
    answers = {**before, **found}
    for node in removed:
        del answers[node]
    return {node: answers[node] for node in sorted(answers)} if added else answers


def _unchanged(found: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether all answers are as before.

    Strings are compared by value, other objects by identity.
    """
    return all(
        now is before[node] or (isinstance(now, str) and now == before[node])
        for node, now in found.items()
    )


def _same(parts: Parts, others: Parts) -> bool:
    return all(one is other for one, other in zip(parts, others, strict=True))
