"""Real agents move a worker between roles when rank 0 asks, and no step is trained twice."""

from __future__ import annotations

import json
from pathlib import Path

from jobs import Job, job


def ask(directory: Path, **roles: int) -> None:
    fresh = directory / "asks.new"
    fresh.write_text(json.dumps(roles))
    fresh.replace(directory / "asks")


def ranks(found: Job) -> list[list[str]]:
    return [event["ranks"] for event in found.events("proposed")]


def test_a_worker_trains_samples_and_trains_again_as_rank_0_asks(tmp_path: Path) -> None:
    words = (
        "--asks",
        str(tmp_path / "asks"),
        "--steps",
        "100000",
        "--until",
        str(tmp_path / "end"),
    )
    with job(tmp_path, *words, nodes=2, per_node=1, roles={"rollout": 2}) as running:
        running.world_of(2)
        ask(tmp_path, trainer=3, rollout=1)
        running.world_of(3)
        running.generation(2)
        ask(tmp_path, trainer=1, rollout=3)
        moves = len(running.history)
        running.await_event(lambda e: e["kind"] == "role_moved" and e["was"] == "trainer/2")
        running.world_of(1, after=moves)
        running.await_event(
            lambda e: e["kind"] == "worker_started" and e["seat"] == "rollout/2", after=moves
        )
        ask(tmp_path, trainer=2, rollout=2)
        running.world_of(2, after=moves)
        running.generation(4)
        (tmp_path / "end").touch()
        assert running.finish().ok
        seats = [[seat.partition("/")[2] for seat in each] for each in ranks(running)]
        assert seats == [["0", "1"], ["0", "1", "2"], ["0"], ["0", "1"]]
        moved = [(each["was"], each["becomes"]) for each in running.events("role_moved")]
        assert moved == [
            ("rollout/1", "trainer/2"),
            ("trainer/2", "rollout/1"),
            ("trainer/1", "rollout/2"),
            ("rollout/2", "trainer/1"),
        ]
        whys = {each["why"] for each in running.events("role_moved")}
        assert whys == {"a file says so; 0 s a step, 0 s expected"}
        assert not [each for each in running.events("detected") if each["what"] != "join"]
        ended = [each["status"] for each in running.events("worker_exited")]
        assert ended.count("it moved to another role") == 4
        steps = [each["step"] for each in running.events("step") if each["rank"] == 0]
        assert steps == sorted(set(steps))
