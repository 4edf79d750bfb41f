"""An engine's samples depend on the prompt, the seed and the weights, and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
import torch

from holdfast.adapters.rl.config import preset
from holdfast.adapters.rl.policy.model import build_model
from holdfast.adapters.rl.policy.policy import full_tensors
from holdfast.adapters.rl.rollout.engine import Engine
from holdfast.adapters.rl.samples.token_record import encode_deltas, fold
from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory
from holdfast.adapters.rl.weights.initial import build_policy

torch.set_num_threads(1)

CONFIGS = {name: preset(name) for name in ("tiny", "quick", "full")}
PROMPTS = [tuple(p) for p in (b"abc>", b"hello>", b"xy>", b"zebra>", b"q>", b"words>", b"tiny>")]


def make_engine(name: str = "tiny", *, slots: int | None = None, version: int = 3) -> Engine:
    config = CONFIGS[name]
    weights = full_tensors(build_model(config.model, seed=5))
    engine = Engine(
        policy=build_policy(config),
        limits=config.limits,
        slots=slots or config.slots,
        seed=config.seed,
    )
    engine.load(weights, version=version, generation=1)
    return engine


def blank(ordinal: int, sample: int = 0) -> Trajectory:
    prompt = PROMPTS[ordinal % len(PROMPTS)]
    return Trajectory(ordinal=ordinal, sample=sample, prompt=prompt)


def drain(engine: Engine, work: Iterable[Trajectory]) -> dict[SampleId, Trajectory]:
    waiting, done = list(work), {}
    while waiting or not engine.idle:
        while waiting and engine.free:
            engine.put(waiting.pop(0))
        done |= {trajectory.key: trajectory for trajectory in engine.tick()}
    return done


WORK = [blank(ordinal, sample) for ordinal in range(8) for sample in range(4)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sample_does_not_depend_on_slot_neighbours_or_order(name: str) -> None:
    together = drain(make_engine(name), WORK)
    shuffled = random.Random(1).sample(WORK, len(WORK))
    other_order = drain(make_engine(name), shuffled)
    engine = make_engine(name)
    alone: dict[SampleId, Trajectory] = {}
    for trajectory in WORK:
        alone |= drain(engine, [trajectory])
    assert together == other_order == alone


def test_every_token_has_a_log_probability_and_a_stamp_and_answers_end() -> None:
    engine = make_engine()
    done = drain(engine, WORK)
    assert set(done) == {trajectory.key for trajectory in WORK}
    for trajectory in done.values():
        assert engine.limits.finished(trajectory)
        assert all(logprob <= 0 for logprob in trajectory.logprobs)
        assert [(s.generation, s.version) for s in trajectory.stamps] == [(1, 3)]


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupted_trajectory_continues_elsewhere_as_if_nothing_had_happened(
    seed: int,
) -> None:
    undisturbed = drain(make_engine(), WORK)
    timing = random.Random(seed)
    waiting, done = list(WORK), {}
    engines = [make_engine(), make_engine(slots=8), make_engine()]
    while waiting or not all(engine.idle for engine in engines):
        for engine in engines:
            while waiting and engine.free:
                engine.put(waiting.pop(timing.randrange(len(waiting))))
            if timing.random() < 0.1:  # the worker dies: its partial trajectories are handed on
                waiting += engine.running()
                engine.unload()
                engine.load(
                    build_model(CONFIGS["tiny"].model, seed=5).state_dict(), version=3, generation=1
                )
            elif timing.random() < 0.7:
                done |= {trajectory.key: trajectory for trajectory in engine.tick()}
    assert done == undisturbed


def test_the_log_folds_back_to_exactly_what_was_sampled() -> None:
    engine, records, done = make_engine(slots=8), [], {}
    waiting = list(WORK)
    for tick in range(12):
        while waiting and engine.free:
            engine.put(waiting.pop())
        done |= {trajectory.key: trajectory for trajectory in engine.tick()}
        if tick % 3 == 2:
            records.append(encode_deltas(engine.take_deltas()))
    expected = done | {t.key: t for t in engine.running() if t.tokens}
    folded = fold(records)
    assert folded.keys() == expected.keys()
    for key, delta in folded.items():
        assert (delta.tokens, delta.logprobs) == (expected[key].tokens, expected[key].logprobs)
        assert delta.stamps == expected[key].stamps


def test_a_continued_trajectory_is_logged_from_its_beginning() -> None:
    first = make_engine()
    first.put(blank(1))
    for _ in range(len(PROMPTS[1]) + 2):
        first.tick()
    (partial,) = first.running()
    second = make_engine()
    second.put(partial)
    second.tick()
    (delta,) = second.take_deltas()
    assert (delta.start, delta.tokens) == (0, partial.tokens)


def test_weights_change_only_between_trajectories() -> None:
    engine = make_engine()
    engine.put(blank(0))
    with pytest.raises(RuntimeError, match="version 4 offered while version 3"):
        engine.load(
            build_model(CONFIGS["tiny"].model, seed=6).state_dict(), version=4, generation=1
        )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: {"logprobs": t.logprobs[1:]}, "tokens with"),
        (lambda t: {"stamps": ()}, "stamps for 0"),
    ],
)
def test_a_trajectory_checks_itself(
    damage: Callable[[Trajectory], dict[str, object]], message: str
) -> None:
    done = next(iter(drain(make_engine(), WORK[:1]).values()))
    fields = {name: getattr(done, name) for name in done.__struct_fields__}
    with pytest.raises(ValueError, match=message):
        Trajectory(**(fields | damage(done)))
