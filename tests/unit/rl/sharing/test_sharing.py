"""Runs that share samples: each group once, none of their own, and the same after a restart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from own_loops import Job, finish
from shared_runs import group_of, origins, share_of, shared_job, train, turns_in_step

from holdfast.adapters.rl import library
from holdfast.adapters.rl.samples.borrowed import Borrowed, borrowed_from
from holdfast.adapters.rl.sharing import sharing
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import (
    GroupLeftOut,
    GroupsBorrowed,
    GroupsShared,
    RuleViolated,
    of_kind,
)

__all__ = ["turns_in_step"]

pytestmark = pytest.mark.usefixtures("turns_in_step")


def given(place: Path, *, name: str = "oslo", steps: int = 6, **options: Any) -> Job:
    """Return a job that has put groups into the pool."""
    job = shared_job()
    train(job, job.enter(name, share=share_of(place, name, **options)), steps)
    return job


def test_a_step_has_own_groups_first_and_then_those_of_others_with_their_log_probabilities(
    tmp_path: Path,
) -> None:
    given(tmp_path)
    job = shared_job()
    batches = train(job, job.enter("lyon", share=share_of(tmp_path, "lyon")), 4)
    assert [origins(batch) for batch in batches] == [[], [], ["oslo/11"], ["oslo/10"]]
    own, others = batches[2][:4], batches[2][4:]
    assert [each.ordinal for each in own] == [4, 4, 5, 5]
    assert all(isinstance(each, Borrowed) for each in others)
    assert [(each.island, each.ordinal, each.sample) for each in others] == [
        ("oslo", 11, 0),
        ("oslo", 11, 1),
    ]
    for each in others:
        assert each.prompt == (1, 11)
        assert each.logprobs == pytest.approx([-0.1 * (token + 1) for token in each.tokens])
        assert each.versions == {5}, "the version of its own run"


def test_the_checker_finds_nothing_and_the_report_counts_them(tmp_path: Path) -> None:
    given(tmp_path)
    job = shared_job()
    rollouts = job.enter("lyon", share=share_of(tmp_path, "lyon"), fatal=True)
    batches = train(job, rollouts, 8)
    report: Any = rollouts.report()
    assert report["violations"] == []
    assert report["ordinals"]["trained"] == 16
    taken = [origin for batch in batches for origin in origins(batch)]
    assert report["groups_borrowed"] == len(taken) == len(set(taken)) == 6
    assert report["groups_missed"] == 1, "the first turn had not been made"
    told = of_kind(job.events, GroupsBorrowed)
    assert [each.groups for each in told] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert told[2].origins == ("oslo/11",)


def test_two_runs_never_get_their_own_groups_back(tmp_path: Path) -> None:
    jobs = {name: shared_job() for name in ("oslo", "lyon")}
    runs = {name: job.enter(name, share=share_of(tmp_path, name)) for name, job in jobs.items()}
    taken: dict[str, Counter[str]] = {name: Counter() for name in jobs}
    for _ in range(8):
        for name, job in jobs.items():
            taken[name].update(origins(job.step(runs[name])))
    for name, found in taken.items():
        assert found
        assert all(not origin.startswith(name) for origin in found)
        assert set(found.values()) == {1}
        assert not of_kind(jobs[name].events, RuleViolated)


def test_a_restart_in_the_midst_of_a_step_trains_on_the_same_groups(tmp_path: Path) -> None:
    given(tmp_path)
    job = shared_job()
    share = share_of(tmp_path, "lyon")
    first = job.enter("p", share=share)
    train(job, first, 3)
    for sample in first.samples():
        finish(sample)
    lost = first.batch()  # and it is killed before the step is complete
    given(tmp_path, name="rome")  # newer groups that it would rather take now
    second = job.enter("q", share=share)
    again = job.step(second)
    key = [(each.key, each.tokens, each.logprobs) for each in again]
    assert key == [(each.key, each.tokens, each.logprobs) for each in lost]
    assert origins(again) == ["oslo/10"]
    assert second.report()["violations"] == []


def test_groups_of_steps_that_were_rolled_back_may_be_taken_once_more_and_no_others(
    tmp_path: Path,
) -> None:
    given(tmp_path)
    job = shared_job()
    share = share_of(tmp_path, "lyon")
    first = job.enter("p", share=share)
    before = train(job, first, 3)
    snapshot, completed = job.snapshot, job.completed
    train(job, first, 2)
    job.snapshot, job.completed = snapshot, completed
    second = job.enter("q", share=share)
    after = train(job, second, 5)
    taken = [origin for batch in (*before, *after) for origin in origins(batch)]
    assert len(taken) == len(set(taken)) == 5
    assert second.report()["violations"] == []


def test_a_killed_run_publishes_what_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_PUBLISH_LIMIT_S", 0.05)
    job = shared_job()
    share = share_of(tmp_path, "oslo")
    job.logs.protected = 0
    train(job, job.enter("p", share=share), 3)
    assert of_kind(job.events, GroupsShared) == []
    job.logs.protected = 3
    train(job, job.enter("q", share=share), 2)
    assert sum(each.groups for each in of_kind(job.events, GroupsShared)) == 6
    names = {path.name for path in tmp_path.glob("sharing/groups/oslo/*/*")}
    assert names == {f"{ordinal:012d}" for ordinal in range(6)}


def test_an_owner_that_went_back_changes_nothing_that_others_may_have(tmp_path: Path) -> None:
    job = shared_job()
    share = share_of(tmp_path, "oslo")
    first = job.enter("p", share=share)
    train(job, first, 1)
    snapshot = job.snapshot
    train(job, first, 2)
    published = {path: path.read_bytes() for path in tmp_path.glob("sharing/groups/oslo/*/*")}
    assert len(published) == 6
    job.snapshot, job.completed = snapshot, 1
    again = job.enter("q", share=share)
    for sample in again.samples():
        while not sample.finished:
            sample.extend([3], [-9.0])  # other samples than before
    again.batch()
    job.completed = job.run.completed = 2
    job.keep(again)
    train(job, again, 1)
    assert {path: path.read_bytes() for path in published} == published


def test_a_run_keeps_its_newest_groups_and_removes_the_others(tmp_path: Path) -> None:
    given(tmp_path, steps=8, keep=3)
    names = sorted(path.name for path in tmp_path.glob("sharing/groups/oslo/*/*"))
    assert names == [f"{ordinal:012d}" for ordinal in (13, 14, 15)]


def test_a_run_that_begins_anew_takes_the_name_and_the_earlier_one_is_refused(
    tmp_path: Path,
) -> None:
    job = shared_job()
    first = job.enter("p", share=share_of(tmp_path, "oslo"))
    train(job, first, 3)
    other = shared_job()
    train(other, other.enter("q", share=share_of(tmp_path, "oslo")), 3)
    assert len(list((tmp_path / "sharing/groups/oslo").iterdir())) == 1
    with pytest.raises(ConfigError, match="another run shares under this name"):
        train(job, first, 2)


def test_a_pool_that_cannot_be_reached_stops_nobody_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sharing").write_text("a file where a folder should be")
    job = shared_job()
    rollouts = job.enter("p", share=share_of(tmp_path, "oslo"))
    assert [len(batch) for batch in train(job, rollouts, 3)] == [4, 4, 4]
    assert of_kind(job.events, GroupsBorrowed)[-1].failed
    assert len([each for each in caplog.records if "trying again" in each.message]) == 1
    (tmp_path / "sharing").unlink()
    train(job, rollouts, 3)
    assert of_kind(job.events, GroupsBorrowed)[-1].failed == ""
    assert of_kind(job.events, GroupsShared)


def test_a_damaged_group_and_one_of_another_shape_are_left_out_by_name(tmp_path: Path) -> None:
    given(tmp_path)
    (damaged,) = tmp_path.glob("sharing/groups/oslo/*/000000000011")
    damaged.write_bytes(damaged.read_bytes()[:-3] + b"1]}")
    given(tmp_path, name="rome", family="another")
    job = shared_job()
    batches = train(job, job.enter("lyon", share=share_of(tmp_path, "lyon")), 5)
    assert [origins(batch) for batch in batches] == [[], [], ["oslo/10"], ["oslo/9"], ["oslo/8"]]
    why = {(each.island, each.ordinal): each.why for each in of_kind(job.events, GroupLeftOut)}
    assert "not those of its digest" in why["oslo", 11]
    assert "family is another" in why["rome", 11]


class Letters:
    """A tokenizer of another vocabulary: tokens are numbered from 40."""

    size, end = 60, 59

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(40 + int(each) for each in text)

    def decode(self, tokens: Any) -> str:
        return "".join(str(token - 40) for token in tokens)


class Digits:
    size, end = 12, 9

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(int, text))

    def decode(self, tokens: Any) -> str:
        return "".join(map(str, tokens))


def test_a_group_of_another_family_is_encoded_again_and_scored_by_this_runs_policy(
    tmp_path: Path,
) -> None:
    given(tmp_path, steps=4, tokenizer=Digits())
    asked = []

    def score(prompt: Any, answer: Any) -> list[float]:
        asked.append((prompt, answer))
        return [-0.5] * len(answer)

    job = shared_job()
    share = share_of(tmp_path, "lyon", family="letters", tokenizer=Letters(), score=score)
    rollouts = job.enter("lyon", share=share, fatal=True)
    batch = train(job, rollouts, 3)[2]
    assert origins(batch) == ["oslo/7"]
    for each in batch[4:]:
        assert each.recoded
        assert each.prompt == (41, 47)
        assert all(40 <= token < 60 for token in each.tokens)
        assert each.logprobs == (-0.5,) * len(each.tokens)
        assert (each.prompt, each.tokens) in asked


@pytest.mark.parametrize("values", [[], [0.0] * 9, [float("nan")]])
def test_scores_that_do_not_fit_are_refused(values: list[float]) -> None:
    (first, _) = borrowed_from(group_of())
    recoded = msgspec.structs.replace(first, recoded=True)
    with pytest.raises(ConfigError, match="one finite log-probability"):
        sharing.scored(recoded, lambda _prompt, _answer: values)
    with pytest.raises(ConfigError, match="give Share"):
        sharing.scored(recoded, None)


def test_numbers_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give numbers that add up to 3"):
        shared_job().enter("p", share=share_of(tmp_path, "oslo", others=2))


def test_snapshots_of_a_run_that_did_not_share_are_gone_on_with(tmp_path: Path) -> None:
    job = Job()
    job.step(job.enter("p"))
    state = json.loads(job.snapshot)
    del state["ledger"]["borrowing"], state["checker"]["borrowed"]
    job.snapshot = json.dumps(state)
    shared = shared_job(steps=4)
    shared.snapshot, shared.completed = job.snapshot, job.completed
    batches = train(shared, shared.enter("q", share=share_of(tmp_path, "oslo")), 3)
    assert [len(batch) for batch in batches] == [4, 4, 4]
