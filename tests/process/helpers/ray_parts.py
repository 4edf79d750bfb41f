"""The parts of a job on Ray without Ray: one thread for each node, in one process.

    python ray_parts.py FOLDER SCRIPT NODES    prints how each part ended, one JSON line each

A file FOLDER/drain-N foretells the end of node N. If this process is killed, the coordinator's
waits for it for a second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from pathlib import Path

from holdfast.adapters.ray import coordinator
from holdfast.adapters.ray.child import HoldfastRun, JobPlace
from holdfast.adapters.ray.coordinator import RayCoordinator
from holdfast.adapters.ray.job import RayJob


def main() -> None:
    """Run the parts to their ends."""
    folder, script, nodes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    vars(coordinator)["RETURN_S"] = 1.0
    job = RayJob(script=script, least=nodes, most=nodes, resources={"CPU": 1})
    with RayCoordinator.opened(job, host="127.0.0.1") as served:
        place = JobPlace(coordinator=served.address, job=served.job)

        def run(number: int) -> None:
            part = HoldfastRun(
                job,
                key=served.key,
                say=lambda line: print(line, file=sys.stderr, flush=True),
                foretold=(folder / f"drain-{number}").exists,
            )
            end = part.run(
                place, node=f"n{number}", host=f"127.0.0.{number + 2}", env=dict(os.environ)
            )
            print(json.dumps({"node": number, **dataclasses.asdict(end)}), flush=True)

        threads = [threading.Thread(target=run, args=[number]) for number in range(nodes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
