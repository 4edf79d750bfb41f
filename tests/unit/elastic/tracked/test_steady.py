"""A pass leaves tracked state as it found it, or is refused with the name of what it changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups import contents
from holdfast.elastic.tracked import steady
from holdfast.elastic.tracked.steady import SteadyState

OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def watch(
    model: nn.Module | None = None, *, moves: bool = False, objects: bool = True, **state: Any
) -> SteadyState:
    own = nn.Module() if model is None else model
    named = lambda: [(f"model.{name}", p) for name, p in own.named_parameters()]  # noqa: E731
    return SteadyState({"model": own, **state}, named, moves=moves, objects=objects)


def refuses(found: SteadyState, change: Callable[[], object], *, words: str, step: int = 0) -> None:
    found.begin_pass(step=step, phase=0)
    change()
    with pytest.raises(ConfigError, match=words):
        found.end_pass()


@pytest.mark.parametrize("by_data", [False, True])
def test_weights(by_data: bool) -> None:
    model = nn.Linear(2, 2)

    @torch.no_grad()
    def move() -> None:
        (model.bias.data if by_data else model.bias).mul_(0.9).add_(1.0)

    refuses(watch(model), move, words=r"run\.track: model\.bias changed inside the pass over run\.")


def test_tensors_in_containers_also_if_they_are_replaced_in_place() -> None:
    state = {"seen": torch.zeros(()), "rows": [torch.zeros(2)]}
    refuses(watch(state=state), lambda: state["seen"].add_(1), words=r"state\.seen changed")
    refuses(watch(state=state), lambda: state["rows"][0].fill_(2), words=r"state\.rows\.0 changed")


@pytest.mark.parametrize(
    ("value", "move", "remedy"),
    [
        ({"n": 1}, lambda v: v.update(n=2), r"run\.gather, run\.reduce"),
        ({"n": 1}, lambda v: v.update(m=1), r"run\.gather, run\.reduce"),
        ([1, 2], lambda v: v.append(3), r"run\.gather, run\.reduce"),
        (np.zeros(2), lambda v: np.add(v, 1, out=v), r"run\.gather, run\.reduce"),
        (torch.Generator(), lambda v: torch.rand(1, generator=v), r"run\.generator\('value'\)"),
        ({"g": torch.Generator()}, lambda v: v["g"].seed(), r"run\.generator\('value\.g'\)"),
        (np.random.default_rng(0), lambda v: v.normal(), r"run\.generator\('value'\)"),
        (np.random.RandomState(0), lambda v: v.normal(), r"run\.generator\('value'\)"),
        (random.Random(0), lambda v: v.random(), r"run\.generator\('value'\)"),
        (
            torch.optim.lr_scheduler.ExponentialLR(OPTIMIZER, 0.9),
            lambda v: v.step(),
            r"call its step\(\) once in the step, after run\.step$",
        ),
        (
            torch.optim.lr_scheduler.ReduceLROnPlateau(OPTIMIZER),
            lambda v: v.step(0.1),
            r"call its step\(\) once in the step, after run\.step$",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_plain_values_schedules_and_generators(value: Any, move: Any, remedy: str) -> None:
    refuses(watch(value=value), lambda: move(value), words=rf"(?s)value.* changed .*{remedy}")


class Noise:
    """An object with a generator of its own, a running mean and a count."""

    def __init__(self) -> None:
        self.generator, self.mean, self.count = torch.Generator(), torch.zeros(3), 0
        self.spare = random.Random(0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self.generator.get_state(),
            "running": {"mean": self.mean.clone(), "count": self.count},
            "spare": [self.spare],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


MOVES = [
    (lambda v: torch.rand(1, generator=v.generator), r"noise\.generator"),
    (lambda v: v.mean.add_(1), r"noise\.running\.mean"),
    (lambda v: setattr(v, "count", 3), r"noise\.running\.count"),
    (lambda v: v.spare.random(), r"noise\.spare\.0"),
]


@pytest.mark.parametrize(("move", "name"), MOVES)
def test_objects_with_a_state_of_their_own(move: Any, name: str) -> None:
    noise = Noise()
    words = (
        rf"^run\.track: {name} changed inside the pass.* draw from run\.generator\('noise'\) in a "
        r"microbatch; or say that every rank keeps its own: holdfast\.PerRank"
    )
    refuses(watch(noise=noise), lambda: move(noise), words=words)


@pytest.mark.parametrize(("move", "_"), MOVES)
def test_objects_that_change_between_passes_or_without_exact(move: Any, _: str) -> None:
    noise, loose = Noise(), Noise()
    found, other = watch(noise=noise), watch(noise=loose, objects=False)
    for step in range(3):
        found.begin_pass(step=step, phase=0)
        found.end_pass()
        move(noise)
        other.begin_pass(step=step, phase=0)
        move(loose)
        other.end_pass()


def test_what_is_taken_back_or_only_read_or_changed_between_passes_is_no_change() -> None:
    model, queue, draws = nn.Linear(2, 2), torch.zeros(3), np.random.default_rng(0)
    found = watch(model, queue=queue, draws=draws, progress={"n": 1})
    for step in range(3):
        found.begin_pass(step=step, phase=0)
        kept = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.add_(1)
            model.weight.copy_(kept)
        found.end_pass()
        queue += 1
        draws.normal()


def test_parameters_that_fsdp2_exchanges_are_not_looked_at() -> None:
    model = nn.Linear(2, 2)
    found = watch(model, moves=True)
    found.begin_pass(step=0, phase=0)
    with torch.no_grad():
        model.weight.zero_()
    found.end_pass()


def test_samples_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "BLOCK_BYTES", 64)
    monkeypatch.setattr(contents, "BLOCK_BYTES", 64)
    monkeypatch.setattr(contents, "_SAMPLE_BYTES", 128)
    queue = torch.zeros(128)
    found, refused = watch(queue=queue), 0
    for step in range(100):
        found.begin_pass(step=step, phase=0)
        queue[17] += step > 0  # in one of eight blocks
        try:
            found.end_pass()
        except ConfigError:
            refused += 1
    assert 0 < refused < 10


class Arrivals:
    """Fills from another thread, as a ledger of rollouts does."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}


def test_an_object_of_which_the_leaders_state_counts_may_fill_during_a_pass() -> None:
    arrivals = Arrivals()
    found = SteadyState(
        {"ledger": {"inner": arrivals}}, list, moves=False, objects=True, of_leader={"ledger"}
    )
    found.begin_pass(step=0, phase=0)
    arrivals.count += 1
    found.end_pass()
