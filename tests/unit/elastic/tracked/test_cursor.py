"""The cursor refuses a state whose numbers do not fit this run."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.elastic.config import Batch, Exact, Settings
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.tracked.cursor import Cursor


def _cursor(**settings: Any) -> Cursor:
    return Cursor(Settings(batch=Batch(microbatches=settings.pop("microbatches", 4)), **settings))


METHODS: tuple[Exact, ...] = ("float32", None)


def test_it_gives_back_what_it_saved() -> None:
    saved = _cursor(exact="float32")
    saved.step, saved.metrics, saved.bounds = 7, {"loss": 0.5}, {"model.w": -3}
    found = _cursor(exact="float32")
    found.load_state_dict(saved.state_dict())
    assert (found.step, found.metrics, found.bounds) == (7, {"loss": 0.5}, {"model.w": -3})


@pytest.mark.parametrize(
    ("settings", "named"), [({"seed": 1}, "seed=0"), ({"microbatches": 8}, "microbatches=4")]
)
def test_another_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _cursor(**settings).load_state_dict(_cursor().state_dict())


def test_threads_and_build_matter_in_exact_mode_only() -> None:
    for exact in METHODS:
        state = _cursor(exact=exact).state_dict()
        state["fingerprint"]["threads"] = 99
        if exact:
            with pytest.raises(ConfigError, match="threads=99"):
                _cursor(exact=exact).load_state_dict(state)
        else:
            _cursor(exact=exact).load_state_dict(state)


@pytest.mark.parametrize(("then", "now"), [(True, "float32"), (False, None), ("int64", "int64")])
def test_checkpoints_from_before_exact_had_names_are_continued(then: object, now: Exact) -> None:
    old = _cursor().state_dict()
    old["fingerprint"]["exact"] = then
    _cursor(exact=now).load_state_dict(old)
    if then is True:
        with pytest.raises(ConfigError, match="exact='float32', this one exact='int64'"):
            _cursor(exact="int64").load_state_dict(old)


@pytest.mark.parametrize("method", ["float32", "int64"])
def test_a_run_whose_model_chooses_the_method_goes_on_by_that_method(method: Exact) -> None:
    chosen, named = _cursor(exact=True), _cursor(exact=method)
    chosen.adds_by(method)
    named.load_state_dict(chosen.state_dict())
    chosen.load_state_dict(named.state_dict())
    other = _cursor(exact=True)
    other.adds_by("int64" if method == "float32" else "float32")
    with pytest.raises(ConfigError, match=f"the saved run has exact='{method}'"):
        other.load_state_dict(chosen.state_dict())


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_exact_weights_go_on_with_as_many_ranks_that_add_up_together_only(axis: str) -> None:
    for exact in METHODS:
        settings = Settings(batch=Batch(microbatches=4), exact=exact)
        old = Cursor(settings).state_dict()
        del old["fingerprint"][axis]  # as it was before there was any
        Cursor(settings).load_state_dict(old)
        two = Cursor(settings, **{axis: 2})
        two.load_state_dict(two.state_dict())
        if exact:
            with pytest.raises(ConfigError, match=f"{axis}=1, this one {axis}=2"):
                two.load_state_dict(old)
        else:
            two.load_state_dict(old)


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="no readable run cursor"):
        _cursor().load_state_dict({"step": "seven"})
