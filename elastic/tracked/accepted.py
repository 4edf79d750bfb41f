"""Refusal of what ``run.track`` cannot bring back: a restore changes objects, never variables."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet
from typing import Any

from holdfast.ckpt.state import plain
from holdfast.ckpt.state.local_boxes import LEAVES
from holdfast.ckpt.state.trees.per_rank import PerRank
from holdfast.elastic.errors import ConfigError

_SHOWN = 40


def check_tracked(state: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` naming the first entry that cannot be restored in place.

    Numbers, strings and None belong to the caller's variables. Inside a dict or a list they are
    restored, because the loop holds the same dict or list.
    """
    for name, value in state.items():
        if isinstance(value, PerRank):
            if _is_fixed(value.value):
                raise ConfigError(_refusal(name, value.value, put="PerRank({})", per_rank=True))
        elif _is_fixed(value):
            raise ConfigError(_refusal(name, value, put="{}"))
        else:
            _check_inside(name, value)


def _is_fixed(value: object) -> bool:
    """Say whether ``value`` is plain and cannot be changed in place."""
    mutable = isinstance(value, MutableMapping | MutableSequence | MutableSet)
    return plain.is_plain(value) and not mutable and not isinstance(value, LEAVES)


def _check_inside(path: str, value: object) -> None:
    """Check the containers that a restore enters; those of plain values it refills as a whole."""
    if plain.is_plain(value) or not isinstance(value, Mapping | list | tuple):
        return
    mutable = isinstance(value, MutableMapping | MutableSequence)
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        at = f"{path}.{key}"
        if not mutable and _is_fixed(item):
            raise ConfigError(
                f"run.track: {at} ({_shown(item)}) is in a {type(value).__name__}, in which a "
                "restore cannot change it: use a dict or a list there"
            )
        _check_inside(at, item)


def _refusal(name: str, value: object, *, put: str, per_rank: bool = False) -> str:
    kind = "None" if value is None else f"a {type(value).__name__}"
    shown = put.format(f'{{"{name}": {_shown(value)}}}')
    given = f"PerRank({_shown(value)})" if per_rank else _shown(value)
    return (
        f"run.track({name}={given}): a restore cannot change the variable that holds {kind}, so "
        f"the loop would go on with the first value. Track a dict, progress={shown}, and read and "
        f'change progress["{name}"] in the loop; or an object with state_dict() and '
        "load_state_dict()" + ("; or leave it out, if it is always None" if value is None else "")
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
