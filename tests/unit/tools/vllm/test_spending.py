"""A token's share of the processor: its server's, and that of everything else."""

from __future__ import annotations

import shlex
import subprocess
import sys

from holdfast.tools.vllm.spending import spent

SPIN = "import time; input()\nwhile time.process_time() < {}: pass\nprint(flush=True); input()"


def test_processors_of_servers_and_of_all_others_are_told_apart() -> None:
    python = [sys.executable, "-S", "-c"]
    below = ["sh", "-c", f"{shlex.join([*python, SPIN.format(0.3)])}; true"]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for command in (below, [*python, SPIN.format(0.6)], [*python, SPIN.format(0.9)])
    ]

    def work() -> int:
        for each in started:
            assert each.stdin
            assert each.stdout
            each.stdin.write(b"\n")
            each.stdin.flush()
            assert each.stdout.readline() == b"\n"
        return 3

    found = spent(work, servers=[started[0].pid, started[2].pid])
    for each in started:
        each.communicate(b"\n")
    assert 0.06 <= found.server_s <= 0.11, "the first server's, which is below its shell"
    assert 0.15 <= found.others_s < 0.3, "neither its own, nor that of the other server"
    assert found.wall_s >= found.server_s
