"""Updates with a GradScaler and with closures: torch's own, or refused by name and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lone_run import lone_run
from torch import nn
from torch.amp.grad_scaler import GradScaler
from updated import DATA, Shim, one_pass, parts

from holdfast.elastic.errors import ConfigError, NotFiniteError
from holdfast.elastic.loop.run import Run

HERE = rf"{Path(__file__).name}:\d+"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run of one rank."""
    with lone_run(tmp_path) as found:
        yield found


def scaled(run: Run, **how: Any) -> tuple[SimpleNamespace, GradScaler]:
    its, scaler = parts(), GradScaler("cpu", init_scale=1024.0, growth_interval=2, **how)
    return its, scaler


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (lambda run, its, s: run.step(its.a, its.b), "a GradScaler scaled the loss of this pass"),
        (
            lambda run, its, s: (s.unscale_(its.a), run.step(its.a, its.b)),
            r"a GradScaler scaled the loss .* call run\.step\(optimizer, scaler=scaler\), in pla",
        ),
        (
            lambda run, its, s: run.step(Shim(lambda: s.step(its.a), s.update)),
            "a GradScaler scaled the loss of this pass, and run.step was not given it",
        ),
        (
            lambda run, its, s: s.step(its.a),
            rf"^scaler\.step at {HERE}: the run makes the updates of a, and all ranks must skip",
        ),
        (
            lambda run, its, s: (run.step(its.a, its.b, scaler=s), s.update()),
            rf"^scaler\.update at {HERE}: run\.step\(optimizer, scaler=scaler\) updates the scale",
        ),
        (lambda run, its, s: run.step(its.a, scaler=3), "scaler=int: give a torch.amp.GradScaler"),
        (
            lambda run, its, s: run.step(Shim(its.a.step), scaler=s),
            "was given a Shim: give it the torch optimizers themselves",
        ),
        (
            lambda run, its, s: run.step(),
            r"^run\.step needs the optimizer: run\.step\(optimizer\), or with a GradScaler "
            r"run\.step\(optimizer, scaler=scaler\)$",
        ),
    ],
)
def test_a_scaler_that_run_step_does_not_get(run: Run, update: Any, words: str) -> None:
    its, scaler = scaled(run)
    run.track(net=its.net, a=its.a, b=its.b, scaler=scaler)
    with pytest.raises(ConfigError, match=words):
        for _ in run.steps(1):
            one_pass(run, its.net, scaler=scaler)
            update(run, its, scaler)


def test_a_scaler_that_is_not_tracked(run: Run) -> None:
    its, scaler = scaled(run)
    run.track(net=its.net, a=its.a, b=its.b)
    words = r"^updated\.py:\d+: this GradScaler is not tracked, so its scale is lost in a restore"
    with pytest.raises(ConfigError, match=words):
        for _ in run.steps(1):
            one_pass(run, its.net, scaler=scaler)


@pytest.mark.parametrize("unscale", [True, False])
def test_a_scaler_that_scaled_nothing(run: Run, unscale: bool) -> None:
    its, scaler = scaled(run)
    run.track(net=its.net, a=its.a, b=its.b, scaler=scaler)
    with pytest.raises(ConfigError, match=r"GradScaler.* scaled no loss of this pass: call run.ba"):
        for _ in run.steps(1):
            one_pass(run, its.net)
            if unscale:
                scaler.unscale_(its.a)
            run.step(its.a, its.b, scaler=scaler)


def test_unscaling_inside_the_pass(run: Run) -> None:
    its, scaler = scaled(run)
    run.track(net=its.net, a=its.a, b=its.b, scaler=scaler)
    with pytest.raises(ConfigError, match=r"unscale_ at .* is inside the pass over run\.micro"):
        for _ in run.steps(1):
            for x in run.microbatches(DATA):
                run.backward(scaler.scale(its.net(x).square().mean()))
                scaler.unscale_(its.a)


@pytest.mark.parametrize("exact", ["float32", None])
def test_a_scaled_run_is_torchs_own(tmp_path: Path, exact: Any) -> None:
    """Two optimizers, an overflow in one step, growth, and a disabled scaler."""
    found: dict[str, Any] = {}
    with lone_run(tmp_path, exact=exact, microbatches=1) as run:
        torch.manual_seed(3)
        its, scaler = scaled(run)
        run.track(net=its.net, a=its.a, b=its.b, scaler=scaler)
        for step in run.steps(6):
            for _ in run.microbatches():
                loss = its.net(DATA).square().mean() * (float("inf") if step == 3 else 1.0)
                run.backward(scaler.scale(loss))
            scaler.unscale_(its.a)
            norm = run.clip_grad_norm_(its.net[0].parameters(), 0.5)
            assert (norm != norm) is (step == 3), "NaN where a gradient is not finite"
            run.step(its.a, its.b, scaler=scaler)
        found = {name: value.clone() for name, value in its.net.state_dict().items()}
        scale = scaler.get_scale()
    torch.manual_seed(3)
    its, scaler = scaled(run)
    for step in range(6):
        loss = its.net(DATA).square().mean() * (float("inf") if step == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(its.a)
        nn.utils.clip_grad_norm_(its.net[0].parameters(), 0.5)
        for optimizer in (its.a, its.b):
            scaler.step(optimizer)
        scaler.update()
        its.net.zero_grad()
    assert scale == scaler.get_scale() == 2048.0
    for name, value in its.net.state_dict().items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_a_disabled_scaler_changes_nothing(run: Run) -> None:
    its, scaler = scaled(run, enabled=False)
    run.track(net=its.net, a=its.a, b=its.b)
    before = its.net[0].weight.clone()
    for _ in run.steps(1):
        one_pass(run, its.net, scaler=scaler)
        run.step(its.a, its.b, scaler=scaler)
        scaler.update()
    assert not torch.equal(its.net[0].weight, before)


def test_an_infinite_gradient_without_the_scaler_ends_the_job(run: Run) -> None:
    its, scaler = scaled(run)
    run.track(net=its.net, a=its.a, b=its.b, scaler=scaler)
    with pytest.raises(NotFiniteError, match=r"the gradient of net\.\d\.\w+ is not finite"):
        for _ in run.steps(1):
            for x in run.microbatches(DATA):
                run.backward(its.net(x).mean() * float("inf"))
            run.step(its.a, its.b)


def lbfgs(run: Run, **how: Any) -> tuple[nn.Module, Any]:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, **how)
    run.track(net=net, optimizer=optimizer)
    return net, optimizer


def square_pass(run: Run, net: nn.Module) -> None:
    for x in run.microbatches(DATA):
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        run.backward(loss)
        run.log(loss=loss)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_is_torchs_own(tmp_path: Path, search: str | None) -> None:
    """Without ``exact`` the mean of the microbatches is computed as by hand, bit for bit."""
    with lone_run(tmp_path, exact=None) as run:
        torch.manual_seed(3)
        net, optimizer = lbfgs(run, line_search_fn=search)
        batches: list[list[torch.Tensor]] = []
        logged = []

        def closure() -> None:
            seen = []
            optimizer.zero_grad()
            for x in run.microbatches(DATA):
                seen.append(x)
                loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
                run.backward(loss)
                run.log(loss=loss)
            if len(batches) == step:
                batches.append(seen)
            assert all(map(torch.equal, seen, batches[step])), "the same samples"

        for step in run.steps(4):  # noqa: B007 - the closure reads it
            first = run.minimize(optimizer, closure)
            logged.append((first, dict(run._logs.latest)))
        found = net.state_dict()
    torch.manual_seed(3)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, line_search_fn=search)
    for step, seen in enumerate(batches):

        def again(seen: list[torch.Tensor] = seen) -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for x in seen:
                loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
                total += loss.detach()
            for parameter in net.parameters():
                parameter.grad.div_(len(seen))
            return total / len(seen)

        first = float(optimizer.step(again))
        assert logged[step] == (first, {"loss": first})
    assert all(map(torch.equal, found.values(), net.state_dict().values()))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run, net, o: run.minimize(o, lambda: None), "the closure of run.minimize made no"),
        (
            lambda run, net, o: (square_pass(run, net), run.step(o)),
            r"optimizer evaluates the loss several times in one step: call run\.minimize\(optim",
        ),
        (
            lambda run, net, o: run.minimize(o, lambda: (square_pass(run, net), run.step(o))),
            "run.step inside run.minimize: the optimizer steps by itself",
        ),
        (
            lambda run, net, o: run.minimize(
                o, lambda: run.minimize(o, lambda: square_pass(run, net))
            ),
            "run.minimize makes its own pass and update",
        ),
        (
            lambda run, net, o: (
                square_pass(run, net),
                run.minimize(o, lambda: square_pass(run, net)),
            ),
            "run.minimize makes its own pass and update",
        ),
        (
            lambda run, net, o: run.minimize(o, lambda: (square_pass(run, net), net.zero_grad())),
            r"the mean gradients were dropped by zero_grad\(\)",
        ),
        (
            lambda run, net, o: run.minimize(
                torch.optim.SGD(net.parameters(), 0.1), lambda: square_pass(run, net)
            ),
            "^run.minimize at .* is not tracked",
        ),
        (
            lambda run, net, o: o.step(lambda: 0.0),
            "optimizer is stepped by hand with a closure: call run.minimize",
        ),
    ],
)
def test_closures_that_do_not_fit(run: Run, call: Any, words: str) -> None:
    net, optimizer = lbfgs(run)
    with pytest.raises(ConfigError, match=words):
        for _ in run.steps(1):
            call(run, net, optimizer)


def test_a_scaler_does_not_fit_a_closure(run: Run) -> None:
    net, scaler = nn.Linear(4, 1), GradScaler("cpu")
    optimizer = torch.optim.LBFGS(net.parameters())
    run.track(net=net, optimizer=optimizer, scaler=scaler)
    with pytest.raises(ConfigError, match=r"run.minimize does not fit a GradScaler"):
        for _ in run.steps(1):
            run.minimize(optimizer, lambda: one_pass(run, net, scaler=scaler))
