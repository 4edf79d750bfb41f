"""Compare-and-set of a small object by obstore: ``If-None-Match`` and ``If-Match``, or generations.

A server is tested once per container, before any commit relies on it: some emulators and gateways
ignore conditions and overwrite.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Final

import obstore

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.cloud.calls import CloudConnection, CloudTarget
from holdfast.ckpt.store.cloud.errors import FAILURES, is_failed_condition, is_missing, said
from holdfast.ckpt.store.cloud.read import fetch_once
from holdfast.ckpt.store.objects.retries import Deadline

if TYPE_CHECKING:
    from obstore import PutMode

_log = logging.getLogger(__name__)

PROBE: Final = ".holdfast-probe-"
"""The prefix of the names of test objects, which are never listed."""

_TRYING: Final = b"Holdfast asks whether this server can write on a condition."


def replace(
    connection: CloudConnection, target: CloudTarget, data: bytes, *, expected: str | None
) -> bool:
    """Publish ``data`` if the object is still at version ``expected``; say whether it is in place.

    When a reply is lost, the condition fails on the next try. So after a failed condition the
    object in place decides: our very bytes count as published by us, any others as a lost race.
    """
    _prove(connection, target)

    def decide(_: Deadline) -> bool:
        if _put_if(connection, target, data, expected):
            return True
        return _in_place(connection, target) == data

    return connection.retrier.send(decide, where=target.where, doing="replace it")


def _put_if(
    connection: CloudConnection, target: CloudTarget, data: bytes, expected: str | None
) -> bool:
    """Write the object in one attempt; say whether the server found the condition true."""
    mode: PutMode = "create"
    if expected is not None:
        mode = {"version": expected}
        if connection.provider.version_key == "e_tag":
            mode = {"e_tag": expected}
    try:
        obstore.put(connection.store, target.key, data, mode=mode)
    except FAILURES as error:
        if not is_failed_condition(error):
            raise
        return False
    return True


def _in_place(connection: CloudConnection, target: CloudTarget) -> bytes | None:
    try:
        return fetch_once(connection, target)[0]
    except FileNotFoundError as error:
        if is_missing(error):
            return None
        raise


def _prove(connection: CloudConnection, target: CloudTarget) -> None:
    """Test once how the server treats conditions. Raises ``StoreError`` if it ignores them."""
    with connection.probing:
        if connection.proves_conditions:
            return
        folder = target.key.rpartition("/")[0]
        name = f"{PROBE}{secrets.token_hex(8)}"
        probe = CloudTarget(key=f"{folder}/{name}" if folder else name, where=target.where)
        try:
            connection.retrier.send(
                lambda _: _probe(connection, probe),
                where=probe.where,
                doing="write it on a condition, which a commit needs",
            )
        finally:
            _remove(connection, probe)
        connection.proves_conditions = True


def _probe(connection: CloudConnection, probe: CloudTarget) -> None:
    obstore.put(connection.store, probe.key, _TRYING)
    first = fetch_once(connection, probe)[1]
    obstore.put(connection.store, probe.key, _TRYING + b" Again.")
    if not _put_if(connection, probe, _TRYING, None) and not _put_if(
        connection, probe, _TRYING, first
    ):
        return
    raise StoreError(
        f"{probe.where}: the server ignores the conditions of a write, so two writers could "
        "overwrite each other's commit; use a server with conditional writes"
    )


def _remove(connection: CloudConnection, probe: CloudTarget) -> None:
    try:
        obstore.delete(connection.store, probe.key)
    except FAILURES as error:
        if not is_missing(error):
            _log.info("%s: %s stays: %s", probe.where, probe.key, said(error))
