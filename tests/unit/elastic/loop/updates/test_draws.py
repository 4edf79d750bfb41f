"""A body that draws from a generator of the script's own is refused by name, and no other is."""

from __future__ import annotations

import functools
import importlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.ckpt.state.trees.per_rank import PerRank
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.updates import draws
from holdfast.elastic.loop.updates.draws import DrawWatch
from holdfast.elastic.seeding import drop_named, named

OWN = torch.Generator().manual_seed(3)
MICROBATCHES = 3
Body = Callable[[int], object]


def passes(body: Body, *, state: dict[str, Any] | None = None, count: int = 2) -> DrawWatch:
    """Make passes of a phase in which ``body`` is the loop's."""
    watch = DrawWatch(state or {})
    for _ in range(count):
        watch.begin_pass(phase=0)
        for m in range(MICROBATCHES):
            watch.begin_body(sys._getframe())
            body(m)
            watch.end_body(m)
        watch.end_pass()
    return watch


def refusal(body: Body, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        passes(body, **options)
    return str(refused.value)


def line_with(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"test_draws.py:{next(n for n, line in enumerate(lines, 1) if text in line)}"


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.source)


@dataclass(slots=True)
class Slotted:
    """Keeps a generator in a slot."""

    rng: Any = field(default_factory=lambda: np.random.default_rng(1))


class OfTheClass:
    """Has a generator for all objects."""

    rng = random.Random(4)


def test_a_module_level_generator_is_named_with_the_line_that_uses_it() -> None:
    def body(_: int) -> None:
        torch.rand(1, generator=OWN)  # the line

    said = refusal(body)
    assert f"generator `OWN` of the script, used at {line_with('# the ' + 'line')}" in said
    assert "inside microbatch 1" in said, "the second body that draws"
    assert "run.generator('OWN')" in said
    assert "run.track(OWN=...)" in said


@pytest.mark.parametrize(
    ("own", "draw", "instead"),
    [
        (torch.Generator(), lambda g: torch.rand(1, generator=g), "run.generator('own')"),
        (np.random.default_rng(0), lambda g: g.normal(), "numpy.random.default_rng(torch."),
        (np.random.RandomState(0), lambda g: g.normal(), "numpy.random.default_rng(torch."),
        (np.random.RandomState(0), lambda g: g.normal(size=9000), "numpy.random.default_rng"),
        (np.random.RandomState(np.random.PCG64(0)), lambda g: g.normal(), "numpy.random.default_"),
        (random.Random(0), lambda g: g.random(), "random.Random(torch.initial_seed())"),
        (random.Random(0), lambda g: g.gauss(0, 1), "random.Random(torch.initial_seed())"),
    ],
    ids=["torch", "numpy", "state", "much", "permuted", "python", "gauss"],
)
def test_each_kind_of_generator_is_refused_with_its_remedy(
    own: Any, draw: Callable[[Any], object], instead: str
) -> None:
    assert instead in refusal(lambda _: draw(own))


def in_a_closure() -> Body:
    rng = random.Random(0)
    return lambda _: rng.random()


def in_a_list() -> Body:
    every = {"rngs": (np.random.default_rng(0),)}
    return lambda _: every["rngs"][0].random()


def in_an_object() -> Body:
    holder = Slotted()
    return lambda _: holder.rng.random()


def in_a_deep_model() -> Body:
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Sequential(Noise()))))
    return lambda _: model(torch.ones(2))


def in_a_partial() -> Body:
    return functools.partial(lambda rng, _: rng.random(), random.Random(0))


def in_a_bound_method() -> Body:
    return functools.partial(_call, Noise().forward)


def _call(function: Callable[[torch.Tensor], object], _: int) -> object:
    return function(torch.ones(1))


def in_a_comprehension_of_a_helper() -> Body:
    return helper


def helper(_: int) -> list[Any]:
    return [torch.rand(1, generator=OWN) for _ in range(2)]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (in_a_closure, "rng"),
        (in_a_list, "every['rngs'][0]"),
        (in_an_object, "holder.rng"),
        (in_a_deep_model, "model.0.0.1.0.source"),
        (in_a_partial, ""),
        (in_a_bound_method, ".source"),
        (lambda: lambda _: OfTheClass.rng.random(), "OfTheClass.rng"),
        (in_a_comprehension_of_a_helper, "OWN"),
    ],
)
def test_a_generator_is_found_wherever_the_body_reaches_it(
    make: Callable[[], Body], name: str
) -> None:
    assert name in refusal(make()).partition(" of the script")[0]


def test_a_generator_of_another_module_of_the_users_is_found(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_noise.py").write_text(
        "import random\nRNG = random.Random(0)\ndef noise():\n    return RNG.random()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    noise = importlib.import_module("own_noise").noise
    assert "generator `RNG` of the script, used at own_noise.py:4" in refusal(lambda _: noise())
    del sys.modules["own_noise"]


@pytest.fixture
def of_the_run() -> Iterator[torch.Generator]:
    yield named("noise", torch.device("cpu"))
    drop_named()


def test_what_the_run_seeds_may_be_drawn_from(of_the_run: torch.Generator) -> None:
    default = torch.default_generator
    hidden = [random.seed.__self__, np.random.normal.__self__]  # type: ignore[attr-defined]

    def body(_: int) -> None:
        torch.rand(1, generator=of_the_run)
        torch.rand(1, generator=default)
        random.random(), np.random.normal(), [each.random() for each in hidden]

    passes(body)


class Holder:
    """Tracked, with a generator that its state has."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("no code of the user's is called")


@pytest.mark.parametrize("wrap", [lambda g: g, PerRank, lambda g: {"a": [g]}, Holder])
def test_tracked_generators_follow_other_rules(wrap: Callable[[Any], Any]) -> None:
    own = np.random.default_rng(0)
    passes(lambda _: own.normal(), state={"own": wrap(own)})


def test_a_generator_of_a_tracked_module_is_none_of_its_state() -> None:
    model = Noise()
    assert "model.source" in refusal(lambda _: model(torch.ones(1)), state={"model": model})


def seeded_torch(g: torch.Generator, m: int) -> object:
    return torch.rand(m + 1, generator=g.manual_seed(m))


def seeded_python(g: random.Random, m: int) -> object:
    g.seed(m)
    return g.random()


def seeded_numpy(g: np.random.RandomState, m: int) -> object:
    g.seed(m)
    return g.normal()


@pytest.mark.parametrize(
    ("own", "draw"),
    [
        (torch.Generator(), seeded_torch),
        (torch.Generator(), lambda g, _: torch.rand(2, generator=g.manual_seed(5))),
        (random.Random(1), seeded_python),
        (random.Random(1), lambda g, _: seeded_python(g, 5)),
        (np.random.RandomState(1), seeded_numpy),
        (np.random.RandomState(1), lambda g, _: seeded_numpy(g, 5)),
    ],
)
def test_a_generator_that_each_body_seeds_is_right(
    own: Any, draw: Callable[[Any, int], object]
) -> None:
    passes(lambda m: draw(own, m))


def test_a_generator_made_in_the_body_is_right() -> None:
    kept = {"rng": random.Random(0)}

    def body(m: int) -> None:
        kept["rng"] = random.Random(m)
        kept["rng"].random()

    passes(body)


def test_draws_between_bodies_are_none_of_a_body() -> None:
    own, watch = random.Random(0), DrawWatch({})
    for _ in range(2):
        watch.begin_pass(phase=0)
        for m in range(MICROBATCHES):
            own.random()
            watch.begin_body(sys._getframe())
            watch.end_body(m)
        watch.end_pass()


def test_a_rank_of_one_microbatch_is_refused_in_the_second_pass() -> None:
    own, watch = random.Random(0), DrawWatch({})

    def one() -> None:
        watch.begin_pass(phase=0)
        watch.begin_body(sys._getframe())
        own.random()
        watch.end_body(0)
        watch.end_pass()

    one()
    with pytest.raises(ConfigError, match="generator `own`"):
        one()


def test_no_code_of_the_users_is_called() -> None:
    class Touchy:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

        def __iter__(self) -> Any:
            raise AssertionError("iter")

        __len__ = __bool__ = __eq__ = __hash__ = __iter__  # type: ignore[assignment]

    class Listing(list):  # type: ignore[type-arg]
        __iter__ = __len__ = __getitem__ = Touchy.__iter__  # type: ignore[assignment]

    class Drawing(random.Random):
        def getstate(self) -> Any:
            raise AssertionError("getstate")

    touchy, listing, drawing = Touchy(), Listing(), Drawing(0)
    passes(lambda _: (id(touchy), id(listing), id(drawing)))
    assert "generator `drawing`" in refusal(lambda _: drawing.random())


def test_the_search_keeps_nothing_alive() -> None:
    import weakref

    class Big:
        pass

    def body(_: int) -> None:
        pass

    big = Big()
    seen = weakref.ref(big)
    passes(body)
    del big
    assert seen() is None


def test_after_the_first_passes_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    own = random.Random(0)
    watch = passes(lambda _: None)
    looked: list[object] = []
    for name in ("reached_from", "state_of"):
        monkeypatch.setattr(draws, name, looked.append)
    watch.begin_pass(phase=0)
    watch.begin_body(sys._getframe())
    own.random()
    watch.end_body(0)
    assert looked == []


def test_the_search_is_bounded_in_time() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.Dropout()) for _ in range(500)))
    many = [{str(n): [n] * 100 for n in range(200)} for _ in range(200)]
    table = {n: [n] for n in range(200_000)}
    modules = {name: each for name, each in sys.modules.items() if type(each) is ModuleType}
    watch, began_s = DrawWatch({"model": model}), time.process_time()
    watch.begin_pass(phase=0)
    watch.begin_body(sys._getframe())
    assert time.process_time() - began_s < 0.5
    assert len(model) and many and table and modules
