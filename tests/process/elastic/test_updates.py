"""Every update that is not the run's is refused in its first step, by name and line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lone_run import lone_run
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer, lr_scheduler
from updated import DATA, Shim, one_pass, parts

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.run import Run

HERE = rf"{Path(__file__).name}:\d+"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run of one rank."""
    with lone_run(tmp_path) as found:
        yield found


def refused(run: Run, words: str, update: Callable[[SimpleNamespace], object], **state: Any) -> str:
    """Train until ``update``, called in each step, is refused in these words; return them all."""
    its = parts()
    run.track(**{"net": its.net, "a": its.a, "b": its.b, **state})
    with pytest.raises(ConfigError, match=words) as caught:
        for _ in run.steps(2):
            update(its)
    return str(caught.value)


def test_two_calls_after_one_pass(run: Run) -> None:
    def twice(its: SimpleNamespace) -> None:
        one_pass(run, its.net)
        run.step(its.a)
        run.step(its.b)

    refused(
        run,
        rf"^run\.step at {HERE} follows that at {HERE} without a pass in between, and each pass "
        r"makes one update: give all its optimizers to one call, as run\.step\(a, b\)$",
        twice,
    )


@pytest.mark.parametrize("after", [False, True])
def test_a_tracked_optimizer_stepped_by_hand(run: Run, after: bool) -> None:
    def by_hand(its: SimpleNamespace) -> None:
        one_pass(run, its.net)
        if after:
            run.step(its.b)
        its.a.step()

    said = refused(run, rf"^{HERE}: the tracked optimizer a is stepped by hand", by_hand)
    assert "call run.step(a) after the pass, with all optimizers of this update in the one" in said
    assert "with a GradScaler run.step(a, scaler=scaler)" in said


def test_a_closure_by_hand(run: Run) -> None:
    refused(
        run,
        r"a is stepped by hand with a closure: call run\.minimize\(a, closure\)",
        lambda its: its.a.step(lambda: None),
    )


def test_an_optimizer_that_is_not_tracked(run: Run) -> None:
    its = parts()
    run.track(net=its.net, b=its.b)
    other = its.a
    with pytest.raises(
        ConfigError,
        match=rf"^run\.step at {HERE}: the optimizer other \(SGD\) is not tracked, so its state "
        r"and its steps are lost in a restore: name it in run\.track",
    ):
        for _ in run.steps(1):
            one_pass(run, its.net)
            run.step(other, its.b)


def test_an_untracked_optimizer_of_tracked_parameters(run: Run) -> None:
    def alien(its: SimpleNamespace) -> None:
        third = torch.optim.SGD(its.net.parameters(), 0.1)
        third.step()

    refused(run, rf"^{HERE}: .* \(third \(SGD\)\) steps net\.0\.weight, which is of a t", alien)


def test_an_optimizer_of_parameters_that_no_module_has(run: Run) -> None:
    its = parts()
    with pytest.raises(
        ConfigError,
        match=r"^run\.track: the optimizer a steps a parameter of no tracked module \(parameter 0 "
        r"of group 0, shape \(8, 4\)\), .* name the module that has it in run\.track as well",
    ):
        run.track(a=its.a)


@pytest.mark.parametrize(
    ("is_stray", "words"),
    [
        (True, r"the optimizer b steps a parameter of no tracked module"),
        (False, r"the parameters of the optimizer b are others than when run\.track was called"),
    ],
)
def test_parameters_that_came_later(run: Run, is_stray: bool, words: str) -> None:
    def grow(its: SimpleNamespace) -> None:
        later = nn.Linear(4, 4)
        if not is_stray:
            its.net.append(later)
        its.b.add_param_group({"params": list(later.parameters())})
        one_pass(run, its.net)
        run.step(its.a, its.b)

    refused(run, words, grow)


def test_own_optimizers_live_for_one_step(run: Run) -> None:
    own = nn.Linear(4, 4)
    kept = torch.optim.SGD(own.parameters(), 0.1)

    def adapt(optimizer: Optimizer) -> None:
        own(DATA).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def update(its: SimpleNamespace) -> None:
        for x in run.microbatches(DATA):
            adapt(torch.optim.SGD(own.parameters(), 0.1))
            run.backward((its.net(x) - own(x).detach()).square().mean())
        run.step(its.a, its.b)
        adapt(kept)
        adapt(kept)

    words = rf"^{HERE}: .*SGD.* was stepped in step 0 and again in step 1, so it persists"
    refused(run, words, update)


@pytest.mark.parametrize(
    ("shim", "words"),
    [
        (lambda its: Shim(), "Shim.* is no torch optimizer, is not tracked and stepped no tracked"),
        (lambda its: Shim(its.a.step, its.a.step), "a is stepped twice by run.step"),
        (
            lambda its: Shim(torch.optim.SGD(its.net.parameters(), 0.1).step),
            r"steps a SGD that is not tracked \(over net\.0\.weight\)",
        ),
    ],
)
def test_objects_that_step_optimizers(run: Run, shim: Any, words: str) -> None:
    def update(its: SimpleNamespace) -> None:
        one_pass(run, its.net)
        run.step(Shim(its.a.step, its.b.step))
        one_pass(run, its.net)
        run.step(shim(its))

    refused(run, words, update)


class Ahead(Optimizer):
    """An optimizer that steps another one over its own parameters."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_the_state_of_an_inner_optimizer_is_tracked_too(run: Run) -> None:
    net = nn.Linear(4, 4)
    plain, moving = (torch.optim.SGD(net.parameters(), 0.1, momentum=m) for m in (0.0, 0.9))
    safe, unsafe, sharing = Ahead(plain), Ahead(moving), Ahead(moving)
    sharing.state = moving.state
    run.track(net=net, safe=safe, unsafe=unsafe, sharing=sharing)
    with pytest.raises(ConfigError, match="unsafe steps a SGD whose state is not a part of its"):
        for _ in run.steps(1):
            for optimizer in (safe, sharing, unsafe):
                one_pass(run, net)
                run.step(optimizer)


def test_a_step_without_an_update(run: Run) -> None:
    refused(
        run,
        r"^step 0 ended without run\.step\(optimizer\): call it after every pass over "
        r"run\.microbatches with run\.backward$",
        lambda its: one_pass(run, its.net),
    )


def test_an_update_in_every_second_step_only(run: Run) -> None:
    def update(its: SimpleNamespace) -> None:
        one_pass(run, its.net)
        if run.completed == 1:
            run.step(its.a, its.b)

    refused(run, r"^step 0 ended without run\.step\(optimizer\): call it after", update)


def test_an_update_inside_the_pass(run: Run) -> None:
    def update(its: SimpleNamespace) -> None:
        for x in run.microbatches(DATA):
            run.backward((its.net(x) - x).square().mean())
            run.step(its.a, its.b)

    refused(
        run,
        rf"^the pass over run\.microbatches begun at {HERE} has not come to its end at {HERE}: "
        r"iterate all of run\.microbatches\(\.\.\.\), by `for` or `enumerate`, one pass at a time",
        update,
    )


def test_zero_grad_inside_a_pass(run: Run) -> None:
    def update(its: SimpleNamespace) -> None:
        for _ in run.microbatches(DATA):
            its.b.zero_grad()

    refused(
        run,
        rf"^zero_grad\(\) at {HERE} is inside the pass over run\.microbatches, where it drops the "
        r"gradients of this rank's earlier microbatches, first that of net\.2\.weight: remove it;",
        update,
    )


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        (lambda p: setattr(p, "grad", None), r"net\.0\.weight was dropped \(\.grad = None\)"),
        (lambda p: p.grad.zero_(), r"net\.0\.weight was set to zero between two microbatches"),
        (lambda p: p.grad.add_(1.0), r"net\.0\.weight changed inside the pass, and not by run"),
        (lambda p: p.sum().backward(), r"net\.0\.weight changed inside the pass, and not by run"),
        (lambda p: p.grad.data.zero_(), r"net\.0\.weight was set to zero between two microb"),
        (
            lambda p: p.grad.data.mul_(0.5),
            r"net\.0\.weight changed inside the pass, and not by run",
        ),
        (
            lambda p: p.grad.detach().numpy().__imul__(0.5),
            r"net\.0\.weight changed inside the pass, and not by run",
        ),
    ],
)
def test_gradients_that_change_between_microbatches(run: Run, drop: Any, words: str) -> None:
    def update(its: SimpleNamespace) -> None:
        for x in run.microbatches(DATA):
            run.backward((its.net(x) - x).square().mean())
            drop(its.net[0].weight)
        run.step(its.a, its.b)  # in the first step exact sums may lie beside .grad

    said = refused(run, words, update)
    assert re.search(rf" \(after {HERE}, before {HERE}\)", said)


def test_gradients_that_a_later_step_changes_by_their_data_are_found_by_sample(run: Run) -> None:
    its = parts()
    run.track(net=its.net, a=its.a, b=its.b)
    steps = run.steps(40)
    with pytest.raises(ConfigError, match=r"net\.2\.bias changed inside the pass, and not by run"):
        for step in steps:
            for x in run.microbatches(DATA):
                run.backward((its.net(x) - x).square().mean())
                its.net[2].bias.grad.data.mul_(1.0 if step < 9 else 0.5)
            run.step(its.a, its.b)
    assert run.completed == 16


def test_a_backward_of_the_scripts_own_in_place_of_the_runs(run: Run) -> None:
    def update(its: SimpleNamespace) -> None:
        for x in run.microbatches(DATA):
            (its.net(x) - x).square().mean().backward()

    refused(run, r"net\.0\.weight changed inside the pass, .*call run\.backward\(loss\)", update)


def test_clipping_inside_the_pass(run: Run) -> None:
    def update(its: SimpleNamespace) -> None:
        for x in run.microbatches(DATA):
            run.backward((its.net(x) - x).square().mean())
            run.clip_grad_norm_(its.net.parameters(), 1e6)

    refused(run, rf"^run\.clip_grad_norm_ at {HERE} inside microbatch 0, where the", update)


def test_tracked_state_that_the_pass_changes(run: Run) -> None:
    tokens = torch.zeros((), dtype=torch.int64)

    def update(its: SimpleNamespace) -> None:
        for x in run.microbatches(DATA):
            run.backward((its.net(x) - x).square().mean())
            tokens.add_(x.numel())

    refused(run, r"^run\.track: tokens changed inside the pass over run\.", update, tokens=tokens)


class Noise:
    """An object with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def draw(self) -> torch.Tensor:
        return torch.randn(4, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


@pytest.mark.parametrize("is_nested", [True, False])
def test_a_tracked_generator_in_a_microbatch(run: Run, is_nested: bool) -> None:
    noise = Noise()

    def update(its: SimpleNamespace) -> None:
        for x in run.microbatches(DATA):
            run.backward((its.net(x + noise.draw()) - x).square().mean())

    tracked: Any = {"generator": noise.generator} if is_nested else noise
    words = r"^run\.track: noise\.generator changed inside the pass over .*run\.generator\('noise"
    refused(run, words, update, noise=tracked)


def test_tracked_generators_between_passes_are_right(run: Run) -> None:
    its, noise, nested, own = parts(), Noise(), Noise(), torch.Generator()
    run.track(net=its.net, a=its.a, b=its.b, noise=noise, rest={"g": nested.generator}, own=own)
    for _ in run.steps(2):
        shift = noise.draw() + nested.draw() + torch.randn(4, generator=own)
        for x in run.microbatches(DATA):
            run.backward((its.net(x + shift) - x).square().mean())
        run.step(its.a, its.b)
    assert run.completed == 2


def test_a_gradient_from_before_the_pass(run: Run) -> None:
    def update(its: SimpleNamespace) -> None:
        its.net(DATA).sum().backward()
        one_pass(run, its.net)

    refused(run, r"^net\.0\.weight has a gradient before the first run\.backward", update)


@pytest.mark.parametrize("to_none", [True, False])
def test_an_update_of_dropped_gradients(run: Run, to_none: bool) -> None:
    def update(its: SimpleNamespace) -> None:
        one_pass(run, its.net)
        its.b.zero_grad(set_to_none=to_none)
        run.step(its.a, its.b)

    refused(
        run,
        rf"^the mean gradients were dropped by zero_grad\(\) at {HERE} after the pass, first that "
        r"of net\.2\.weight, so run\.step would change nothing: remove that",
        update,
    )


def test_zero_grad_elsewhere_and_gradients_left_out_are_harmless(run: Run) -> None:
    its = parts()
    frozen, twin = its.net[2].bias.clone(), nn.Linear(4, 4)
    run.track(net=its.net, a=its.a, b=its.b)
    for _ in run.steps(2):
        its.net.zero_grad()
        its.a.zero_grad(set_to_none=False)
        for x in run.microbatches(DATA):
            twin.zero_grad()
            twin(x).sum().backward()
            run.backward((its.net(x) - x).square().mean())
        its.net[2].bias.grad = None
        run.step(its.a, its.b)
        its.net.zero_grad()
    assert torch.equal(its.net[2].bias, frozen)


@pytest.mark.parametrize(
    "make",
    [
        lambda a: lr_scheduler.StepLR(a, 2),
        lr_scheduler.ReduceLROnPlateau,
        lambda a: lr_scheduler.SequentialLR(
            a, [lr_scheduler.StepLR(a, 2), lr_scheduler.ConstantLR(a)], milestones=[3]
        ),
        lambda a: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(a, 2)], optimizer=a),
    ],
)
@pytest.mark.parametrize("when", ["before", "late", "in the loop"])
def test_a_scheduler_that_is_not_tracked(run: Run, make: Any, when: str) -> None:
    its, kept = parts(), []
    if when == "before":
        kept.append(make(its.a))
    run.track(net=its.net, a=its.a, b=its.b)
    if when == "late":
        kept.append(make(its.a))
    after = "" if when == "before" else ", after run.track"
    words = rf"LR\w*|ChainedScheduler made at {HERE}{after} sets the learning rate of the tracked"
    with pytest.raises(ConfigError, match=words) as caught:
        for _ in run.steps(1):
            if when == "in the loop":
                kept.append(make(its.a))
            one_pass(run, its.net)
            run.step(its.a, its.b)
    assert "optimizer a and is not in run.track, so its count is lost in a restore" in str(
        caught.value
    )


class Holder:
    """A wrapper of a scheduler, with its state."""

    def __init__(self, scheduler: lr_scheduler.LRScheduler) -> None:
        self.inside = {"one": [scheduler]}

    def state_dict(self) -> dict[str, Any]:
        return self.inside["one"][0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inside["one"][0].load_state_dict(state)


def test_schedulers_in_tracked_objects_and_those_that_are_gone_are_no_concern(run: Run) -> None:
    its = parts()
    lr_scheduler.StepLR(its.a, 2)  # gone at once
    first, second = lr_scheduler.StepLR(its.a, 2), lr_scheduler.ConstantLR(its.a)
    sequence = lr_scheduler.SequentialLR(its.a, [first, second], milestones=[1])
    wrapped = Holder(lr_scheduler.LambdaLR(its.b, lambda step: 0.5**step))
    stray = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    other = lr_scheduler.StepLR(stray, 2)
    run.track(net=its.net, a=its.a, b=its.b, schedules={"a": sequence}, wrapped=wrapped)
    for _ in run.steps(2):
        one_pass(run, its.net)
        run.step(its.a, its.b)
        sequence.step()
    assert run.completed == 2
    assert other is not None


def test_everything_is_put_back(tmp_path: Path) -> None:
    owners = [nn.Module, Optimizer, GradScaler, lr_scheduler.LRScheduler]
    before = [dict(vars(owner)) for owner in owners]
    with lone_run(tmp_path) as run:
        its = parts()
        run.track(net=its.net, a=its.a, b=its.b)
        assert vars(nn.Module)["zero_grad"] is not before[0]["zero_grad"]
    assert [dict(vars(owner)) for owner in owners] == before
    its.net(DATA).sum().backward()
    its.a.step()
    assert re.match(HERE, f"{Path(__file__).name}:1")
