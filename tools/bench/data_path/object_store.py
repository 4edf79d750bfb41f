"""Section store: files written to and read from an object store, beside its plain client.

The client is boto3 for ``s3://``, and obstore for ``gs://`` and ``az://``: one request for a whole
file, and eight requests at once for the same bytes in eight files. Server and client may share a
machine, so the processor time of each is told apart, that of the server where it is one of this
machine's and ``--server`` names its processes.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from typing_extensions import Buffer

from holdfast.ckpt.errors import InternalError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.places import open_store, scheme_of
from holdfast.elastic.errors import ConfigError
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Case, Timings, in_turn, stopwatch
from holdfast.tools.environment import cpu_s

WRITE, READ = "write", "read"
AT_ONCE: Final = 8
EIGHT: Final = ", eight at once"
CLIENT, SERVER = "processor time of", "processor time of the server for"
SCHEMES: Final = frozenset({"s3", "gs", "az"})
_FILE: Final = "file"
_PART_BYTES: Final = 8 << 20


class PlainClient(NamedTuple):
    """The store's own client: its calls for a whole object below the root."""

    name: str
    put: Callable[[str, bytes], object]
    get: Callable[[str], bytes]


def store(setup: BenchSetup) -> list[BenchRow]:
    """Time files below the root that ``--store`` names; they are removed at the end."""
    if setup.store is None or scheme_of(setup.store) not in SCHEMES:
        raise ConfigError(
            f"the section store measures {setup.store or 'nothing'}; name a place of an object "
            "store, as in --store az://container/prefix"
        )
    root = f"{setup.store.rstrip('/')}/bench-{secrets.token_hex(4)}"
    ours, data = open_store(root), os.urandom(setup.size_bytes)
    plain, piece = _plain(root), -(-len(data) // AT_ONCE)
    pieces = {f"plain-{at}": data[at : at + piece] for at in range(0, len(data), piece)}
    put, get = f"{plain.name} put", f"{plain.name} get"
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            writes: dict[str, Callable[[], object]] = {
                put: lambda: plain.put("plain", data),
                f"{put}{EIGHT}": lambda: list(pool.map(plain.put, pieces, pieces.values())),
                WRITE: lambda: ours.write(_FILE, _parts(data)),
            }
            reads: dict[str, Callable[[], Sequence[Buffer]]] = {
                get: lambda: [plain.get("plain")],
                f"{get}{EIGHT}": lambda: list(pool.map(plain.get, pieces)),
                READ: lambda: [_read(ours, len(data))],
            }
            cases = [_written(name, work, setup.server) for name, work in writes.items()]
            cases += [_gotten(name, work, setup.server, data) for name, work in reads.items()]
            samples = in_turn(cases, setup)
    finally:
        ours.delete([_FILE, "plain", *pieces])
    pairs = {WRITE: READ, put: get, f"{put}{EIGHT}": f"{get}{EIGHT}"}
    return [
        samples.row(
            "store",
            names[0],
            len(data),
            *names[1:],
            extra=[*_processors(samples, names), *(extra if names[0] == WRITE else ())],
        )
        for extra in [_ratios(samples, pairs)]
        for names in ([*pairs], [*pairs.values()])
    ]


def _written(name: str, work: Callable[[], object], server: Sequence[int]) -> Case:
    def case() -> Mapping[str, float]:
        with _spending(name, server) as spent:
            work()
        return spent

    return case


def _gotten(
    name: str, work: Callable[[], Sequence[Buffer]], server: Sequence[int], data: bytes
) -> Case:
    """Return a case that compares what came back, outside of its time."""

    def case() -> Mapping[str, float]:
        with _spending(name, server) as spent:
            found = work()
        left = memoryview(data)
        for each in found:
            if left[: len(memoryview(each))] != each:
                raise InternalError(f"{name}: other bytes came back; report this")
            left = left[len(memoryview(each)) :]
        if left:
            raise InternalError(f"{name}: {len(left)} bytes are missing; report this")
        return spent

    return case


@contextmanager
def _spending(name: str, server: Sequence[int]) -> Iterator[dict[str, float]]:
    """Yield seconds by name, filled at the end: those of the clock and of both processors."""
    spent: dict[str, float] = {}
    client_s, server_s = time.process_time(), sum(map(cpu_s, server))
    with stopwatch() as seconds:
        yield spent
    spent[name] = seconds[0]
    spent[f"{CLIENT} {name}"] = time.process_time() - client_s
    if server:
        spent[f"{SERVER} {name}"] = sum(map(cpu_s, server)) - server_s


def _processors(samples: Timings, names: Sequence[str]) -> list[tuple[str, float, str]]:
    wanted = [f"{side} {name}" for side in (CLIENT, SERVER) for name in names]
    return [(each, samples.yardstick(each).seconds, "s") for each in wanted if each in samples]


def _ratios(samples: Timings, pairs: Mapping[str, str]) -> list[tuple[str, float, str]]:
    return [
        (f"{one} / {other}", samples.yardstick(one).seconds / samples.yardstick(other).seconds, "")
        for one, other in pairs.items()
    ]


def _parts(data: bytes) -> list[memoryview]:
    view = memoryview(data)
    return [view[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]


def _read(ours: Store, nbytes: int) -> bytearray:
    file, room = ours.open(_FILE), bytearray(nbytes)
    file.read_into([room], 0)
    file.close()
    return room


def _plain(root: str) -> PlainClient:
    scheme, _, rest = root.partition("://")
    container, _, prefix = rest.partition("/")
    if scheme.lower() == "s3":
        return _boto3(container, prefix)
    import obstore
    from obstore.store import from_url

    remote: Any = from_url(
        f"{scheme.lower()}://{container}", client_options={"allow_http": True, "timeout": "180s"}
    )
    return PlainClient(
        "obstore",
        lambda name, data: obstore.put(remote, f"{prefix}/{name}", data, use_multipart=False),
        lambda name: bytes(obstore.get(remote, f"{prefix}/{name}").bytes()),
    )


def _boto3(bucket: str, prefix: str) -> PlainClient:
    import boto3

    client: Any = boto3.client("s3")

    def place(name: str) -> dict[str, str]:
        return {"Bucket": bucket, "Key": f"{prefix}/{name}"}

    def get(name: str) -> bytes:
        data: bytes = client.get_object(**place(name))["Body"].read()
        return data

    return PlainClient("boto3", lambda name, data: client.put_object(**place(name), Body=data), get)
