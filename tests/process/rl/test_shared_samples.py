"""Jobs of the built-in sampler that share samples, with real processes, one of them killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobs import hurt
from rl_jobs import alone, rl_job

from holdfast.adapters.rl.config import RLConfig, WarmStart, preset
from holdfast.adapters.rl.ledger.checker import CheckConfig
from holdfast.adapters.rl.sharing.settings import ShareConfig

OWN, OTHERS = 3, 1


def sharing(place: Path, name: str, *, steps: int, seed: int = 0) -> RLConfig:
    share = ShareConfig(meet=str(place / "pool"), name=name, own=OWN, others=OTHERS)
    return msgspec.structs.replace(
        preset("tiny"),
        steps=steps,
        seed=seed,
        share=share,
        warm=WarmStart(steps=0),
        check=CheckConfig(recompute_every=2, fatal=True),
    )


def folder(place: Path, name: str) -> Path:
    (place / name).mkdir()
    return place / name


def judge(result: dict[str, Any], *, steps: int) -> None:
    ledger = result["ledger"]
    assert ledger["ok"], ledger
    assert result["violations"] == []
    counts = {state: count for state, count in ledger["ordinals"].items() if count}
    assert counts == {"trained": steps * OWN}
    assert ledger["groups_borrowed"] + ledger["groups_missed"] == (steps - 1) * OTHERS


@pytest.mark.slow
def test_a_job_trains_on_groups_that_another_sampled(tmp_path: Path) -> None:
    judge(alone(folder(tmp_path, "oslo"), sharing(tmp_path, "oslo", steps=3)), steps=3)
    config = sharing(tmp_path, "lyon", steps=8, seed=1)
    result = alone(folder(tmp_path, "lyon"), config)
    judge(result, steps=8)
    assert result["ledger"]["groups_borrowed"] > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_killed_job_trains_on_the_same_groups_again_and_on_none_twice(tmp_path: Path) -> None:
    steps = 24
    judge(alone(folder(tmp_path, "oslo"), sharing(tmp_path, "oslo", steps=12)), steps=12)
    lyon = folder(tmp_path, "lyon")
    with rl_job(lyon, sharing(tmp_path, "lyon", steps=steps, seed=1)) as job:
        for generation in (2, 3):
            so_far = len(job.history)
            job.await_event(
                lambda e: e["kind"] == "groups_borrowed" and e["groups"] > 0, after=so_far
            )
            rank_0 = job.events("proposed")[-1]["ranks"][0]
            hurt(job.worker(rank_0), signal.SIGKILL)
            job.generation(generation)
        outcome = job.finish()
        assert outcome.ok, outcome.message
        told = job.events("groups_borrowed")
    judge(json.loads((lyon / "result.json").read_bytes()), steps=steps)
    surviving: dict[int, list[str]] = {}
    for event in told:
        again = event["step"] in surviving and event["step"] <= max(surviving)
        if again:  # the first step of a generation has what its snapshot recorded
            assert surviving[event["step"]] == event["origins"]
            surviving = {step: each for step, each in surviving.items() if step < event["step"]}
        surviving[event["step"]] = event["origins"]
    assert sorted(surviving) == list(range(1, steps + 1))
    taken = [origin for origins in surviving.values() for origin in origins]
    assert taken
    assert len(taken) == len(set(taken))
    assert all(origin.startswith("oslo/") for origin in taken)
