"""Search for keys that a job left in an etcd, which outlives the job."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.coordinator.connecting import is_etcd
from holdfast.elastic.coordinator.etcd.address import EtcdAddress
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.launch.config import ETCD_TIMING
from holdfast.elastic.membership.view import run_prefix

_LEASE_S: Final = 2 * ETCD_TIMING.lease_ttl_s + 3.0
"""Longest life of a lease after its job: etcd renews all leases when it elects a leader."""

_POLL_S: Final = 0.1


def left_keys(address: str, run: str) -> list[str]:
    """Return the keys of an ended run that its etcd still has; none for another coordinator.

    The launcher removes all keys, so only a key with a lease can remain, and its lease runs out. If
    there is such a key, wait for that.
    """
    if not run or not is_etcd(address):
        return []
    from holdfast.elastic.coordinator.etcd.coordinator import EtcdCoordinator

    try:
        with contextlib.closing(EtcdCoordinator(EtcdAddress.parse(address))) as coordinator:
            return keys_of(coordinator, run)
    except CoordinatorError as error:
        return [f"cannot list the keys that are left in etcd: {error}"]


def keys_of(
    coordinator: Coordinator,
    run: str,
    *,
    lease_s: float = _LEASE_S,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Return the keys of a run that remain after those with leases have had ``lease_s`` to go."""
    deadline_s = now_s() + lease_s
    while True:
        entries, _ = coordinator.range(run_prefix(run))
        if not any(entry.lease for entry in entries) or now_s() > deadline_s:
            return [
                f"left behind: key {entry.key} in the coordinator"
                + (f", its lease has not ended in {lease_s:g} s" if entry.lease else "")
                for entry in entries
            ]
        sleep(_POLL_S)
