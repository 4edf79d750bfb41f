"""The output of `holdfast status` from the sidecars' answers."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from node_answers import ANSWERING, SILENT, STORED
from rich.console import Console

from holdfast.tools.show.node_status import NodeStatus
from holdfast.tools.show.status_view import seconds, summary, view


def shown(*nodes: NodeStatus) -> str:
    console = Console(file=StringIO(), width=160)
    console.print(view(nodes))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def row(text: str, *words: str) -> list[str]:
    """Return the cells of the first line that begins with these words."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return next(cells for cells in rows if cells[: len(words)] == list(words))


def test_the_first_line_says_what_could_be_returned_to() -> None:
    line = summary([SILENT, ANSWERING])
    assert (
        line == "job 4d95-d21b7b: 2 nodes, generation 3; newest restore point step 40, 0.25 s old"
    )


def test_a_job_without_a_protected_snapshot_says_so() -> None:
    fresh = {**STORED, "protected": -1, "restore_point_age_s": None}
    line = summary([NodeStatus(node="n0", sidecar=7, status=fresh)])
    assert line.endswith("1 node, generation 3; no snapshot is protected yet")


def test_a_node_is_a_row_of_steps_age_and_time_to_protected() -> None:
    cells = row(shown(ANSWERING), "n0")
    assert cells == ["n0", "3", "41", "40", "30", "0.25 s", "20.0 ms", "0.30 s"]


def test_a_stage_is_a_row_of_times_bytes_and_rate() -> None:
    cells = row(shown(ANSWERING), "seal")
    assert cells == ["seal", "n0", "9", "20.0 ms", "0.30 s", "1.0 GiB", "512.0 MiB/s"]


def test_memory_stands_beside_its_budget() -> None:
    memory = shown(ANSWERING).partition("budget")[2]
    assert row(memory, "n0")[1:] == [
        *("4.0 MiB", "1.0 MiB", "0 B", "6.0 MiB", "8.0 MiB"),
        *("small", "2.0 MiB"),
    ]


def test_everything_wrong_is_a_line() -> None:
    text = shown(ANSWERING, SILENT)
    for line in (
        "n0: step 41 is not protected: no room for a parity row",
        "n0: fragments for n1: 3 queued, the oldest 4.2 s; last error: no answer",
        "n0: logs are full: the logs of node n0 hold 1,048,576 bytes and may hold 1,048,576",
        "n0: log rollout/0: 7 records are not on every copy, the oldest for 1.5 s",
        "n0: checkpoint of step 40 failed: full",
        "n0: messages refused: 2 stale generation",
        "n1: tcp://x: no answer to status within 3 s",
    ):
        assert line in text.splitlines()
    assert "gossip" not in text


def test_lost_data_workers_are_a_line() -> None:
    said = "trainer/0 lost data workers (1 died), the last of loader 'data': killed by SIGKILL"
    node = NodeStatus(node="n0", sidecar=7, status=STORED, data_troubles={"trainer/0": said})
    assert f"n0: {said}" in shown(node).splitlines()


def test_a_node_that_is_not_reached_is_a_line() -> None:
    node = NodeStatus(node="n0", sidecar=7, status=STORED, unreachable=("n2",))
    assert "n0: does not reach node n2" in shown(node).splitlines()


def test_what_was_protected_before_a_loss_does_not_count_as_protected() -> None:
    lost = NodeStatus(node="n0", sidecar=7, status={**STORED, "protected": -1, "held": 40})
    ending = "; no snapshot is protected yet, step 40 of an earlier generation is available"
    assert summary([lost]).endswith(ending)


def test_a_sidecar_that_has_just_started_is_shown_without_figures() -> None:
    new = {"run": "r", "generation": 0, "committed": -1, "protected": -1}
    assert row(shown(NodeStatus(node="n0", sidecar=7, status=new)), "n0")[1:] == ["0", *"––––––"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0.0 ms"), (0.0994, "99.4 ms"), (0.0996, "0.10 s"), (600.0, "10 min")],
)
def test_durations_are_in_the_unit_that_fits(value: float | None, text: str) -> None:
    assert seconds(value) == text
