"""A stranger at every port of a running job: it finds no store, and the job goes on."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from jobs import Job, launched, trainers
from listening import listening

from holdfast.ckpt.torch_private import TCPStore

TINY = Path(__file__).parents[1] / "helpers" / "tiny_training.py"


def processes(running: Job) -> set[int]:
    found = {os.getpid()}
    for node in running.launcher.processes().values():
        found |= {node.agent, node.sidecar, *node.workers.values()}
    return found


KEYS = [f"/g{number}/0//cpu//0/{rank}".encode() for number in range(20) for rank in range(3)]
"""Names under which the ranks of coming generations look for each other."""


def poisoned(port: int) -> bool:
    """Do what ended jobs, without torch or any key; say whether a store took the garbage."""
    with socket.create_connection(("127.0.0.1", port), 5) as raw:
        raw.settimeout(1.0)
        try:
            raw.sendall(b"\x00" + struct.pack("<I", 0x3C85F7CE))
            for key in KEYS:
                garbage = struct.pack("<Q", 7) + b"garbage"
                raw.sendall(b"\x01" + struct.pack("<Q", len(key)) + key + garbage)
            raw.sendall(b"\x07")  # how many keys are there?
            answer = raw.recv(8)
        except OSError:
            return False
    return len(answer) == 8 and len(KEYS) <= struct.unpack("<q", answer)[0] < 2 * len(KEYS)


def test_the_attack_would_find_a_store_of_torch() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert poisoned(store.port)
    assert store.get("g3/0//cpu//0/1") == b"garbage"


def test_no_port_of_a_job_is_a_store_for_strangers(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    script = ["--result", str(tmp_path / "result"), "--steps", "12", "--gate", "3", str(go_on)]
    config = trainers(TINY, script, slots=2, run_dir=tmp_path / "run")
    with launched(config) as running:
        running.await_step(2)
        ports = set(listening(processes(running)))
        assert len(ports) >= 5, "coordinator, sidecar, two workers and gloo"
        assert {address for address, _ in ports} == {"0100007F"}, "the loopback alone"
        for _, port in sorted(ports):
            assert not poisoned(port), port
        go_on.touch()
        outcome = running.finish()
    assert outcome.ok, outcome
    assert len(running.events("proposed")) == 1
