"""A `LossGuard` together with a GradScaler, with LBFGS, and with a gradient that is not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lone_run import lone_run
from torch import nn
from torch.amp.grad_scaler import GradScaler

from holdfast.elastic.errors import JobFailedError, NotFiniteError, RollBackError
from holdfast.elastic.loop.run import Run
from holdfast.elastic.loss import LossGuard

DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
SKIP = LossGuard(nonfinite="skip")
BAD = 2
"""The step whose loss is wrong."""


def square(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def copy_of(*parts: Any) -> list[Any]:
    """Return the state of modules, optimizers and scalers, apart from them."""
    found: list[Any] = []

    def leaves(value: Any) -> None:
        if isinstance(value, dict | list | tuple):
            for each in value.values() if isinstance(value, dict) else value:
                leaves(each)
        else:
            found.append(value.tolist() if isinstance(value, torch.Tensor) else value)

    for part in parts:
        leaves(part.state_dict())
    return found


@pytest.fixture(params=["float32", None], ids=["exact", "not exact"])
def exact(request: pytest.FixtureRequest) -> Any:
    return request.param


class Scaled:
    """A training through a GradScaler, whose ``loss`` or ``gradient`` goes wrong in a step."""

    def __init__(self, run: Run, wrong: str) -> None:
        self.run, self.wrong = run, wrong
        self.net = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 0.1)
        self.scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        run.track(net=self.net, optimizer=self.optimizer, scaler=self.scaler)

    def train(self) -> None:
        """Train; the bad step must leave weights and optimizer as they were."""
        for step in self.run.steps(5):
            before = copy_of(self.net, self.optimizer)
            for x in self.run.microbatches(DATA):
                loss = square(self.net, x)
                factor = float("inf") if step == BAD and self.run.microbatch == 1 else 1.0
                self.run.log(loss=loss * (factor if self.wrong == "loss" else 1.0))
                self.run.backward(self.scaler.scale(loss * factor))
            self.scaler.unscale_(self.optimizer)
            self.run.clip_grad_norm_(self.net.parameters(), 1.0)
            self.run.step(self.optimizer, scaler=self.scaler)
            assert (copy_of(self.net, self.optimizer) == before) is (step == BAD)


def test_an_overflow_is_the_scalers_and_the_guard_does_not_see_it(
    tmp_path: Path, exact: Any
) -> None:
    with lone_run(tmp_path, exact=exact, guard=LossGuard(nonfinite="stop")) as run:
        training = Scaled(run, "gradient")
        training.train()
    assert training.scaler.get_scale() == 512.0


def test_a_wrong_loss_is_the_guards_and_leaves_the_scale_alone(tmp_path: Path, exact: Any) -> None:
    with lone_run(tmp_path, exact=exact, guard=SKIP) as run:
        training = Scaled(run, "loss")
        training.train()
    assert training.scaler.get_scale() == 1024.0


@pytest.mark.parametrize(
    ("response", "error"), [("rollback", RollBackError), ("stop", JobFailedError)]
)
def test_a_wrong_loss_rolls_back_or_ends_the_job_with_a_scaler_too(
    tmp_path: Path, response: Any, error: type[Exception]
) -> None:
    guard = LossGuard(nonfinite=response)
    words = f"step {BAD}: loss is inf"
    with lone_run(tmp_path, guard=guard) as run, pytest.raises(error, match=words):
        Scaled(run, "loss").train()


def lbfgs(run: Run) -> tuple[nn.Module, Any]:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    run.track(net=net, optimizer=optimizer)
    return net, optimizer


def test_a_bad_first_evaluation_leaves_weights_and_history_as_they_were(
    tmp_path: Path, exact: Any
) -> None:
    with lone_run(tmp_path, exact=exact, guard=SKIP) as run:
        net, optimizer = lbfgs(run)
        for step in run.steps(5):

            def closure(step: int = step) -> None:
                for x in run.microbatches(DATA):
                    loss = square(net, x) * (float("nan") if step == BAD else 1.0)
                    run.backward(loss)
                    run.log(loss=loss)

            before = copy_of(net, optimizer)
            loss = run.minimize(optimizer, closure)
            assert (loss != loss) is (step == BAD)
            assert (copy_of(net, optimizer) == before) is (step == BAD)
        assert all(p.isfinite().all() for p in net.parameters())


def test_the_guard_judges_an_update_once_by_the_weights_before_it(tmp_path: Path) -> None:
    """Losses on the way of a line search are no spikes."""
    guard = LossGuard(spike="stop", warmup=2, window=4, factor=3.0)
    with lone_run(tmp_path, guard=guard) as run:
        net, optimizer = lbfgs(run)
        evaluations: list[int] = []

        def closure() -> None:
            evaluations.append(run.completed)
            tried = evaluations.count(run.completed)
            for x in run.microbatches(DATA):
                loss = square(net, x) + (1000.0 if tried == 2 else 1.0)  # the search goes too far
                run.backward(loss)
                run.log(loss=loss)

        for _ in run.steps(4):
            run.minimize(optimizer, closure)
            assert run.metrics["loss"] < 100.0
        assert all(evaluations.count(step) > 2 for step in range(4))


def test_an_evaluation_on_the_way_that_is_not_finite_ends_the_job(tmp_path: Path) -> None:
    """The weights have been moved by then, so there is no update to leave out."""
    with lone_run(tmp_path, guard=SKIP) as run:
        net, optimizer = lbfgs(run)
        seen = 0

        def closure() -> None:
            nonlocal seen
            seen += 1
            for x in run.microbatches(DATA):
                run.backward(square(net, x) * (float("nan") if seen == 2 else 1.0))
                run.log(loss=square(net, x))

        with pytest.raises(NotFiniteError, match=r"the gradient of net\.\w+ is not finite"):
            for _ in run.steps(1):
                run.minimize(optimizer, closure)


def test_a_closure_beside_a_scaler_of_another_phase_is_not_forgiven_an_infinity(
    tmp_path: Path,
) -> None:
    with lone_run(tmp_path) as run:
        net, scaler = nn.Linear(4, 1), GradScaler("cpu")
        optimizer = torch.optim.LBFGS(net.parameters())
        run.track(net=net, optimizer=optimizer, scaler=scaler)

        def closure() -> None:
            for x in run.microbatches(DATA):
                run.backward(net(x).mean() * float("inf"))

        with pytest.raises(NotFiniteError, match=r"the gradient of net\.\w+ is not finite"):
            for _ in run.steps(1):
                run.minimize(optimizer, closure)


def test_a_warning_about_a_gradient_applies_none_of_this_rank_alone(tmp_path: Path) -> None:
    """With ``exact`` no mean is made of it, so what is applied must not be finite anywhere."""
    with lone_run(tmp_path, guard=LossGuard(nonfinite="warn")) as run:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        run.track(net=net, optimizer=optimizer)
        for _ in run.steps(1):
            for x in run.microbatches(DATA):
                loss = square(net, x)
                run.backward(loss + net[1].bias.sum() * float("inf"))
                run.log(loss=loss)
            run.step(optimizer)
        assert all(parameter.isnan().all() for parameter in net.parameters())
