"""The answer of an invented sidecar, and of one that says nothing."""

from __future__ import annotations

from typing import Any

from holdfast.tools.show.node_status import NodeStatus

METER = {"seconds": 2.0, "bytes": 1 << 30, "median_s": 0.02, "max_s": 0.3, "last_s": 0.02}
SEAL = {"count": 9, **METER}
STORED: dict[str, Any] = {
    "run": "4d95-d21b7b",
    "generation": 3,
    "committed": 41,
    "protected": 40,
    "persisted": [10, 30, 20],
    "restore_point_age_s": 0.25,
    "bytes": {"slots": 4 << 20, "parity": 1 << 20, "logs": 0, "disk": 2 << 20, "budget": 8 << 20},
    "memory": {
        "mode": "small",
        "need_bytes": 6 << 20,
        "left_out": None,
        "logs_most_bytes": 1 << 20,
        "logs_refused": "the logs of node n0 hold 1,048,576 bytes and may hold 1,048,576",
    },
    "meters": {"seal": SEAL, "protect": SEAL},
    "refusals": {"stale generation": 2},
    "peers": {
        "n1/fragments": {"queued": 3, "oldest_s": 4.2, "dropped": 0, "error": "no answer"},
        "n1/gossip": {"queued": 0, "oldest_s": 0.0, "dropped": 0, "error": ""},
    },
    "unprotected": {"3/41": "no room for a parity row"},
    "log_lag": {"rollout/0": {"records": 7, "bytes": 90, "oldest_s": 1.5}},
    "log_errors": {},
    "persist_failed_in_a_row": 1,
    "persist_error": "checkpoint of step 40 failed: full",
    "spill_error": None,
}
ANSWERING = NodeStatus(node="n0", sidecar=7, workers={"trainer/0": 8}, status=STORED)
SILENT = NodeStatus(node="n1", sidecar=9, error="tcp://x: no answer to status within 3 s")
