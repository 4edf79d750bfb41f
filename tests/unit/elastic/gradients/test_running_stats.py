"""Running statistics after a pass are those of a plain loop over the microbatches, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.buffers import PassBuffers


class Alone:
    """A world of one."""

    index, size = 0, 1

    def max_(self, tensor: torch.Tensor) -> None: ...

    def sum_(self, tensor: torch.Tensor) -> None: ...

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        return lambda: None


Body = Callable[[nn.Module, torch.Tensor], Any]


def once(model: nn.Module, x: torch.Tensor) -> None:
    model(x)


def kept(model: nn.Module, *, exact: Exact = "float32", microbatches: int = 4) -> PassBuffers:
    return PassBuffers({"model": model}, Alone(), microbatches=microbatches, exact=exact)


def batches(*shape: int, seed: int = 0) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for scale in (1.0, 3.0, 0.01, 1000.0):
        yield torch.randn(shape, generator=generator) * scale + scale


def run(model: nn.Module, inputs: list[torch.Tensor], body: Body = once, passes: int = 3) -> None:
    buffers = kept(model, microbatches=len(inputs))
    for _ in range(passes):
        buffers.begin_pass()
        for number, x in enumerate(inputs):
            buffers.begin_microbatch(number)
            body(model, x)
        buffers.end_pass()
    buffers.close()


def same(one: nn.Module, other: nn.Module) -> bool:
    found, wanted = one.state_dict(), other.state_dict()
    return found.keys() == wanted.keys() and all(
        torch.equal(found[k], wanted[k]) and found[k].dtype == wanted[k].dtype for k in found
    )


def as_plainly(model: nn.Module, inputs: list[torch.Tensor], body: Body = once) -> bool:
    plain = copy.deepcopy(model)
    run(model, inputs, body)
    for _ in range(3):
        for x in inputs:
            body(plain, x)
    return same(model, plain)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(5), (7, 5)),
    "1d, sequences": (lambda: nn.BatchNorm1d(5), (7, 5, 3)),
    "2d": (lambda: nn.BatchNorm2d(5), (3, 5, 4, 4)),
    "3d": (lambda: nn.BatchNorm3d(5), (2, 5, 2, 3, 4)),
    "not affine": (lambda: nn.BatchNorm1d(5, affine=False), (7, 5)),
    "cumulative": (lambda: nn.BatchNorm1d(5, momentum=None), (7, 5)),
    "momentum 0": (lambda: nn.BatchNorm1d(5, momentum=0.0), (7, 5)),
    "another momentum": (lambda: nn.BatchNorm1d(5, momentum=0.37), (7, 5)),
    "float64": (lambda: nn.BatchNorm1d(5, dtype=torch.float64), (7, 5)),
    "bfloat16": (lambda: nn.BatchNorm2d(5, dtype=torch.bfloat16), (3, 5, 4, 4)),
    "no statistics": (lambda: nn.BatchNorm1d(5, track_running_stats=False), (7, 5)),
    "evaluation": (lambda: nn.BatchNorm1d(5).eval(), (7, 5)),
    "no instance statistics": (lambda: nn.InstanceNorm1d(5), (7, 5, 6)),
}


@pytest.mark.parametrize("case", CASES)
def test_statistics_are_those_of_a_plain_loop(case: str) -> None:
    build, shape = CASES[case]
    model = build()
    dtype = next(iter(model.state_dict().values()), torch.zeros(())).dtype
    assert as_plainly(model, [x.to(dtype) for x in batches(*shape)])


def test_channels_last_and_half_precision_inputs_too() -> None:
    wide = list(batches(3, 5, 4, 4))
    assert as_plainly(
        nn.BatchNorm2d(5), [x.contiguous(memory_format=torch.channels_last) for x in wide]
    )
    assert as_plainly(nn.BatchNorm2d(5), [x.to(torch.bfloat16) for x in wide])


@pytest.mark.parametrize("momentum", [0.1, None])
def test_instance_statistics_are_those_of_a_plain_loop_but_for_the_last_bits(
    momentum: float | None,
) -> None:
    model = nn.InstanceNorm1d(5, track_running_stats=True)
    model.momentum = momentum  # type: ignore[assignment]
    plain, inputs = copy.deepcopy(model), list(batches(7, 5, 6))
    run(model, inputs, passes=1)
    for x in inputs:
        plain(x)
    for name, buffer in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], buffer)


def test_a_layer_that_runs_twice_in_a_microbatch_keeps_the_order() -> None:
    """As a discriminator sees real samples, then fake ones."""

    def body(model: nn.Module, x: torch.Tensor) -> None:
        model(x)
        with torch.no_grad():
            model(x * 5 - 1)

    assert as_plainly(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), list(batches(7, 5)), body)


def test_layers_may_run_in_some_microbatches_only() -> None:
    def body(model: nn.Module, x: torch.Tensor) -> None:
        often, seldom, never = model.children()
        often(x)
        if x.std() > 2:
            seldom(often(x))
        never.eval()(x)

    model = nn.Sequential(*(nn.BatchNorm1d(5, momentum=None) for _ in range(3)))
    assert as_plainly(model, list(batches(7, 5)), body)
    assert [int(each.num_batches_tracked) for each in model.children()] == [18, 6, 0]


def test_an_evaluation_inside_a_pass_sees_the_statistics_of_its_start() -> None:
    model, seen = nn.BatchNorm1d(5), []

    def body(model: nn.Module, x: torch.Tensor) -> None:
        model(x)
        seen.append(model.eval()(torch.ones(1, 5)))
        model.train()

    run(model, list(batches(7, 5)), body, passes=1)
    assert all(torch.equal(each, seen[0]) for each in seen)


def test_forwards_outside_of_microbatches_are_torchs_own() -> None:
    model, plain = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
    buffers = kept(model)
    buffers.begin_pass()
    buffers.begin_microbatch(0)
    buffers.end_pass()
    for x in batches(7, 5):
        model(x)
        plain(x)
    assert same(model, plain)


def test_recomputed_forwards_count_as_in_a_plain_loop() -> None:
    layers = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5))

    def body(model: nn.Module, x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        checkpoint(model, x, use_reentrant=False).sum().backward()

    assert as_plainly(layers, list(batches(7, 5)), body)


def test_a_forward_that_fails_leaves_the_layer_as_it_was() -> None:
    model = nn.BatchNorm1d(5)
    buffers, before = kept(model), model.running_mean
    buffers.begin_pass()
    buffers.begin_microbatch(0)
    with pytest.raises(RuntimeError):
        model(torch.zeros(3, 4))
    assert model.running_mean is before
    assert model.momentum == 0.1
    buffers.end_pass()
    assert int(model.num_batches_tracked) == 0


def test_buffers_of_a_functional_call_are_left_alone() -> None:
    model, x = nn.BatchNorm1d(5), next(batches(7, 5))
    plain = copy.deepcopy(model)
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers = kept(model)
    buffers.begin_pass()
    buffers.begin_microbatch(0)
    torch.func.functional_call(model, {**dict(model.named_parameters()), **own}, (x,))
    buffers.end_pass()
    assert same(model, plain)
    plain(x)
    assert all(torch.equal(own[name], buffer) for name, buffer in plain.named_buffers())


def test_functional_gradients_work() -> None:
    def body(model: nn.Module, x: torch.Tensor) -> None:
        parameters = dict(model.named_parameters())
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)

    inputs = list(batches(7, 5))
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    plain = copy.deepcopy(model)
    run(model, inputs, body)
    run(plain, inputs)
    assert same(model, plain)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_are_compiled_once(backend: str) -> None:
    """A trace that held the number of the microbatch would be made anew for each."""
    torch.compiler.reset()
    model, inputs = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), list(batches(7, 5))
    plain, counts = copy.deepcopy(model), torch._dynamo.utils.counters
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    counts.clear()
    run(compiled, inputs)
    run(plain, inputs)
    assert same(model, plain)
    assert counts["stats"]["unique_graphs"] == 1


def test_a_model_that_was_compiled_before_it_was_tracked_is_refused() -> None:
    model = nn.BatchNorm1d(5)
    compiled: Any = torch.compile(model, backend="eager")
    compiled(torch.ones(7, 5))
    with pytest.raises(ConfigError, match=r"run\.track before the first forward of a compiled"):
        run(compiled, list(batches(7, 5)))


class SyncBatchNormOfOurs(nn.BatchNorm1d):
    """Stands for those of other libraries."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("kind", [nn.SyncBatchNorm, SyncBatchNormOfOurs])
def test_layers_that_wait_for_other_ranks_are_refused_unless_frozen(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(5))
    x = torch.ones(7, 5)
    buffers = kept(model, exact=None)
    buffers.begin_pass()
    buffers.begin_microbatch(0)
    with pytest.raises(ConfigError, match=r"model\.0 is a Sync.*use BatchNorm"):
        model(x)
    model.eval()(x)
    buffers.end_pass()


class Recorder(nn.BatchNorm1d):
    """A layer of the user's whose forward may do anything with its statistics."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None
        self.running_mean.add_(x.mean(0))
        return x


def test_layers_with_a_forward_of_their_own_are_refused_with_exact() -> None:
    with pytest.raises(ConfigError, match=r"model\.running_mean \(of a Recorder\)"):
        run(Recorder(5), list(batches(7, 5)))
