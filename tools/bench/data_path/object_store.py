"""Section store: files written to and read from an object store, beside its plain client.

The client is boto3 for ``s3://``, and obstore for ``gs://`` and ``az://``: one request for a whole
file. Server and client may share a machine, so the processor time of this process is shown too.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from holdfast.ckpt.errors import InternalError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.places import open_store, scheme_of
from holdfast.elastic.errors import ConfigError
from holdfast.tools.bench.samples import BenchRow, BenchSetup, in_turn, timed

WRITE, READ = "write", "read"
SCHEMES: Final = frozenset({"s3", "gs", "az"})
_FILE, _PLAIN_FILE = "file", "plain"
_PART_BYTES: Final = 8 << 20


class PlainClient(NamedTuple):
    """The store's own client: its calls for a whole object."""

    name: str
    put: Callable[[bytes], object]
    get: Callable[[], object]


def store(setup: BenchSetup) -> list[BenchRow]:
    """Time one file below the root that ``--store`` names; it is removed at the end."""
    if setup.store is None or scheme_of(setup.store) not in SCHEMES:
        raise ConfigError(
            f"the section store measures {setup.store or 'nothing'}; name a place of an object "
            "store, as in --store az://container/prefix"
        )
    root = f"{setup.store.rstrip('/')}/bench-{secrets.token_hex(4)}"
    ours, data = open_store(root), os.urandom(setup.size_bytes)
    plain = _plain(root)
    names = (f"{plain.name} put", f"{plain.name} get")
    works: dict[str, Callable[[], object]] = {
        names[0]: lambda: plain.put(data),
        WRITE: lambda: ours.write(_FILE, _parts(data)),
        names[1]: plain.get,
        READ: lambda: _read(ours, data),
    }
    try:
        samples = in_turn([timed(name, work) for name, work in works.items()], setup)
        spent = {name: _processor_s(work) for name, work in works.items()}
    finally:
        ours.delete([_FILE, _PLAIN_FILE])
    return [
        samples.row("store", name, len(data), beside, extra=_extra(spent, name, beside))
        for name, beside in ((WRITE, names[0]), (READ, names[1]))
    ]


def _extra(spent: Mapping[str, float], name: str, beside: str) -> list[tuple[str, float, str]]:
    return [
        ("processor time", spent[name], "s"),
        (f"processor time of {beside}", spent[beside], "s"),
    ]


def _parts(data: bytes) -> list[memoryview]:
    view = memoryview(data)
    return [view[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]


def _read(ours: Store, data: bytes) -> None:
    file, room = ours.open(_FILE), bytearray(len(data))
    if file.read_into([room], 0) != len(data) or room != data:
        raise InternalError(f"{ours.where(_FILE)}: other bytes came back; report this")
    file.close()


def _processor_s(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _plain(root: str) -> PlainClient:
    scheme, _, rest = root.partition("://")
    container, _, prefix = rest.partition("/")
    key = f"{prefix}/{_PLAIN_FILE}"
    if scheme.lower() == "s3":
        import boto3

        client: Any = boto3.client("s3")
        place = {"Bucket": container, "Key": key}

        def get() -> bytes:
            data: bytes = client.get_object(**place)["Body"].read()
            return data

        return PlainClient("boto3", lambda data: client.put_object(**place, Body=data), get)
    import obstore
    from obstore.store import from_url

    remote: Any = from_url(
        f"{scheme.lower()}://{container}", client_options={"allow_http": True, "timeout": "180s"}
    )
    return PlainClient(
        "obstore",
        lambda data: obstore.put(remote, key, data),
        lambda: bytes(obstore.get(remote, key).bytes()),
    )
