"""The groups of a step are written once, and are the same for everybody who reads them."""

from __future__ import annotations

import msgspec
import pytest
from doubles.memory_store import MemoryStore

from holdfast.adapters.rl.cast.step_log import StepLog, resampled
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory
from holdfast.ckpt.errors import CorruptError
from holdfast.elastic.errors import JobFailedError

SAMPLE = Trajectory(
    ordinal=4,
    sample=1,
    prompt=(1, 2),
    tokens=(7, 8, 9),
    logprobs=(-0.1, -1.5, -3.0000001192092896),
    stamps=(Stamp(generation=3, version=2, count=3),),
).replied((), state='{"a":1}', reward=0.5, rewards=(0.5, -0.25))


def test_a_step_comes_back_bit_for_bit() -> None:
    log = StepLog(MemoryStore())
    assert (log.span(), log.read(4)) == ((0, 0), None)
    log.publish(4, [SAMPLE])
    assert log.read(4) == (SAMPLE,)
    assert log.span() == (4, 5)


def test_the_same_groups_by_a_later_generation_are_the_same() -> None:
    log = StepLog(MemoryStore())
    log.publish(0, [SAMPLE])
    log.publish(0, resampled([SAMPLE], generation=9))
    assert log.read(0) == (SAMPLE,), "the first ones stay"


def test_other_groups_for_the_same_step_end_the_job() -> None:
    log = StepLog(MemoryStore())
    log.publish(0, [SAMPLE])
    with pytest.raises(JobFailedError, match="other groups than this run sampled"):
        log.publish(0, [msgspec.structs.replace(SAMPLE, ordinal=5)])


def test_samples_of_a_generation_keep_their_versions() -> None:
    (again,) = resampled([SAMPLE], generation=7)
    assert again.stamps == (Stamp(generation=7, version=2, count=3),)
    assert msgspec.structs.replace(again, stamps=SAMPLE.stamps) == SAMPLE


def test_steps_and_evaluations_below_are_forgotten() -> None:
    log = StepLog(MemoryStore())
    for step in range(3):
        log.publish(step, [SAMPLE])
        log.note(step, {"held_out": step / 3})
    log.forget(2)
    assert log.span() == (2, 3)
    assert (log.noted(1), log.noted(2)) == (None, {"held_out": 2 / 3})


def test_the_first_result_of_an_evaluation_stays() -> None:
    log = StepLog(MemoryStore())
    log.note(6, {"held_out": 0.25})
    log.note(6, {"held_out": 0.5})
    assert log.noted(6) == {"held_out": 0.25}


@pytest.mark.parametrize("damage", [b"", b"0000\n[]", b"not of this version"])
def test_a_damaged_step_is_named(damage: bytes) -> None:
    store = MemoryStore()
    log = StepLog(store)
    log.publish(0, [SAMPLE])
    store.write("steps/000000000000", [damage])
    with pytest.raises(CorruptError, match="steps/000000000000"):
        log.read(0)
