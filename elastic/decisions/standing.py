"""Places in the user's code at which the ranks wait for each other, from the nodes' reports. Pure.

A rank that calls a collective which others do not call waits for ever. The others wait for it in
the next collective that all call.
"""

from __future__ import annotations

from collections import defaultdict

from holdfast.elastic.membership.view import JobView

SHARDED_MODULE = "a module under fully_shard"
"""Start of a place where the ranks gather parameters or scatter gradients for a module."""

_USERS = ("dist.", "DTensor.", SHARDED_MODULE)
"""Starts of the places that are collectives of the user's code, the likeliest to be wrong first."""

_NAMED = 8


def stands_of(view: JobView) -> dict[str, list[str]]:
    """Return the members of the newest generation by the place where they wait; known ones only."""
    found: dict[str, list[str]] = defaultdict(list)
    for member in view.generation.members if view.generation else ():
        home = view.nodes.get(member.node)
        if home is None or home.standing != view.number:
            continue
        if place := home.stands.get(member.seat):
            found[place].append(member.seat)
    return dict(found)


def apart(view: JobView) -> bool:
    """Return whether all ranks wait, some in a collective of the user's and some elsewhere."""
    found = stands_of(view)
    members = view.generation.members if view.generation else ()
    known = sum(map(len, found.values()))
    calls = {place.partition(" at ")[0] for place in found}
    return known == len(members) > 0 and len(calls) > 1 and _in_users(found) != ""


def where_ranks_wait(view: JobView) -> str:
    """Return where the ranks wait, as clauses with a remedy; '' if that is not known."""
    found = stands_of(view)
    if not found:
        return ""
    clauses = [f"{_seats(seats)} in {place}" for place, seats in found.items()]
    text = "; ".join(clauses[:_NAMED])
    call = _in_users(found)
    if len(found) > 1 and call:
        text += f". Call {call} on all ranks alike, or on none"
    return text


def _in_users(found: dict[str, list[str]]) -> str:
    named = (place for start in _USERS for place in found if place.startswith(start))
    return next(named, "")


def _seats(seats: list[str]) -> str:
    shown = ", ".join(seats[:_NAMED])
    return shown if len(seats) <= _NAMED else f"{shown} and {len(seats) - _NAMED} others"
