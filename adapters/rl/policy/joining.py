"""The settings of jobs in which each policy has a run of its own: checked, and alike in all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.places import scheme_of
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError

_FILE: Final = "settings.json"
_OWN: Final = (
    *("join", "policy", "checkpoint", "checkpoint_every", "hold", "warm_start", "check"),
    *("parity", "min_dp", "tp", "slots", "log_every_ticks", "log_rollouts"),
)
"""Settings that each run may have as it likes: no step trains on anything else by them."""


def check_join(
    join: str, trained: Sequence[str], *, policy: str, excluded: Mapping[str, bool]
) -> None:
    """Raise ``ValueError`` for runs that cannot be: ``trained`` are the policies to be trained.

    ``excluded`` says which settings are there that such runs do not have.
    """
    if scheme_of(join):
        raise ValueError(f"join is {join}: give a directory that all runs see, not an address")
    if len(trained) < 2:
        raise ValueError(
            f"join: {len(trained)} of the policies are trained, needed: at least 2; set it to null"
        )
    if policy and policy not in trained:
        raise ValueError(f"policy is {policy!r}, needed: one that is trained, of {[*trained]}")
    for setting, is_there in excluded.items():
        if is_there:
            raise ValueError(f"join with {setting}: set one of them to null or its default")


def require_same_settings(store: Store, settings: Mapping[str, Json]) -> None:
    """Write the settings, or compare them with those that another run wrote.

    Raises ``ConfigError`` that names the settings in which they differ.
    """
    common = {name: value for name, value in settings.items() if name not in _OWN}
    if store.replace(_FILE, msgspec.json.format(msgspec.json.encode(common)), expected=None):
        return
    try:
        found = msgspec.json.decode(store.read(_FILE), type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{store.where(_FILE)}: no settings: {error}; remove it") from error
    differ = _differ(msgspec.json.decode(msgspec.json.encode(common)), found)
    if differ:
        raise ConfigError(
            f"{store.where(_FILE)}: the runs of other policies have other settings: "
            f"{', '.join(sorted(differ))}; start all runs with the same file, or give this job an "
            "empty directory"
        )


def _differ(one: Mapping[str, object], other: Mapping[str, object]) -> Collection[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
