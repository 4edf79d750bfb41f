"""`holdfast bench store` on the servers that the tests start, with their processors' time.

By hand: ``python tests/services/bench_stores.py [s3] [az] [gs] [arguments of the bench]``. A server
that cannot be had is left out, with a word.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import azurite
import ceph
import google_xml
from keeper import CannotInstall, Facts, end
from object_places import ObjectPlace, azure_place_of, google_place_of, s3_place_of
from ports import free_ports

Service = Callable[[Path], AbstractContextManager[Facts]]


@contextlib.contextmanager
def _google(folder: Path) -> Iterator[Facts]:
    """Run the tests' own server as a process of its own."""
    port = free_ports(1)[0]
    with (folder / "google.out").open("ab") as log:
        process = google_xml.start(folder, port, log)
    try:
        yield google_xml.facts_of(port)
    finally:
        end(process)


SERVERS: dict[str, tuple[Service, Callable[[Facts], ObjectPlace]]] = {
    "s3": (ceph.cluster, s3_place_of),
    "az": (azurite.server, azure_place_of),
    "gs": (_google, google_place_of),
}


def measure(kind: str, words: list[str]) -> int:
    """Measure one kind of store; return the exit code, 0 for one that cannot be had."""
    service, place_of = SERVERS[kind]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-store-")))
        try:
            place = place_of(stack.enter_context(service(folder)))
        except CannotInstall as error:
            print(f"{kind}: left out: {error}", flush=True)
            return 0
        servers = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        print(f"{kind}:", flush=True)
        return subprocess.call(
            [
                *(sys.executable, "-m", "holdfast.tools.cli", "bench", "store"),
                *("--store", place.url, "--server", ",".join(servers), *words),
            ],
            env={**os.environ, **place.environment},
        )


def main() -> None:
    """Measure the kinds that are named, or all."""
    kinds = [word for word in sys.argv[1:] if word in SERVERS]
    words = [word for word in sys.argv[1:] if word not in SERVERS]
    sys.exit(max(measure(kind, words) for kind in kinds or SERVERS))


if __name__ == "__main__":
    main()
