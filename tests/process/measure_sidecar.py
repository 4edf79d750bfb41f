"""Measure seal-to-protected and rebuild times: ``python tests/process/measure_sidecar.py``.

Three sidecar processes on this machine stand for three nodes; every byte between them goes
through CURVE on the loopback, so on few cores this measures the cipher more than the codec.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from sidecar_group import inventories, sidecar_group, write_step

from ckpt.stripes import restore_points

NODES = ("a", "b", "c")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64, help="state per node")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    nbytes = arguments.megabytes << 20
    with (
        tempfile.TemporaryDirectory() as directory,
        sidecar_group(Path(directory), *NODES) as group,
    ):
        world = group.adopt(parity=1)
        payloads = {}
        for step in range(arguments.steps):
            payloads = write_step(group, world, step, sizes=[nbytes] * len(NODES))
        times_s = group.clients["a"].status()["seal_to_protected_s"]
        rest_s = group.clients["c"].status()["seal_to_protected_s"]
        group.kill("c", wipe=True)
        point = restore_points(inventories(group))[0][0]
        group.adopt(generation=2, restore=point)
        source = point.sources[2]
        client = group.clients[source.node]
        began_s = time.monotonic()
        client.open_block(world, point.step, source)
        rebuild_s = time.monotonic() - began_s
        assert client.read(world, point.step, 2, [(0, 100)])[0] == payloads[2][:100]
    print(f"3 nodes of {arguments.megabytes} MB, parity 1, {arguments.steps} steps")
    print(f"first seal to protected  median {statistics.median(times_s):.3f} s")
    print(f"last seal to protected   median {statistics.median(rest_s):.3f} s")
    print(f"rebuild of a lost block  {rebuild_s:.3f} s")


if __name__ == "__main__":
    main()
