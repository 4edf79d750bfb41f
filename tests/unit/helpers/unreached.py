"""A brute-force search for nodes of a view that do not reach each other."""

from __future__ import annotations

from holdfast.elastic.membership.view import JobView, identity


def broken_pairs(view: JobView) -> dict[str, set[str]]:
    """Return the nodes of which one says that it does not reach the other as it is now."""
    found: dict[str, set[str]] = {}
    for name, node in view.nodes.items():
        for other, mark in node.unreachable.items():
            if other != name and other in view.nodes and identity(view.nodes[other]) == mark:
                found.setdefault(name, set()).add(other)
                found.setdefault(other, set()).add(name)
    return found
