"""All other state of a training run: schedules, scalers, samplers, averages, every dtype."""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import RandomSampler

from holdfast import ckpt
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.hashing import state_hash

State = dict[str, Any]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def through_a_checkpoint(root: Path, state: State, other: State) -> ckpt.RestoreReport:
    ckpt.save(root, state, step=1)
    return ckpt.load(root, other)


SCHEDULES = {
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 7], 0.5),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
}


def scheduled(name: str, seed: int) -> State:
    model = net(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * seed, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "schedule": SCHEDULES[name](optimizer)}


def train(state: State, steps: int) -> list[float]:
    rates = []
    for step in range(steps):
        state["optimizer"].zero_grad()
        loss = state["model"](torch.full((4, 3), 1.0 + step)).square().sum()
        loss.backward()
        state["optimizer"].step()
        metric = (
            {"metrics": 1.0}
            if isinstance(state["schedule"], lr_scheduler.ReduceLROnPlateau)
            else {}
        )
        state["schedule"].step(**metric)
        rates.append(state["optimizer"].param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_go_on_where_they_were(name: str, tmp_path: Path) -> None:
    state, other = scheduled(name, 1), scheduled(name, 2)
    train(state, 4)
    through_a_checkpoint(tmp_path, state, other)
    assert train(other, 6) == train(state, 6)
    assert state_hash({"model": other["model"]}) == state_hash({"model": state["model"]})


def test_a_gradient_scaler_keeps_its_scale(tmp_path: Path) -> None:
    def build() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    scaler, other = build(), build()
    for bad in (False, False, True, False):
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        loss = (weight * (math.inf if bad else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    through_a_checkpoint(tmp_path, {"scaler": scaler}, {"scaler": other})
    assert other.state_dict() == scaler.state_dict()
    assert other.state_dict()["_growth_tracker"] == 1


class Sampler:
    """A resumable sampler: torch's own has no state, so loops keep generator and position."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.sampler = RandomSampler(range(10), generator=self.generator)
        self.at, self.epoch_start = 0, self.generator.get_state()
        self.order: Iterator[int] = iter(self.sampler)

    def draw(self) -> int:
        self.at += 1
        return next(self.order)

    def state_dict(self) -> State:
        return {"generator": self.epoch_start, "at": self.at}

    def load_state_dict(self, state: State) -> None:
        self.generator.set_state(state["generator"])
        self.epoch_start = self.generator.get_state()
        self.order, self.at = iter(self.sampler), 0
        for _ in range(state["at"]):
            self.draw()


def test_a_sampler_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    sampler, other = Sampler(1), Sampler(2)
    seen = [sampler.draw() for _ in range(4)]
    through_a_checkpoint(tmp_path, {"sampler": sampler}, {"sampler": other})
    rest = [other.draw() for _ in range(6)]
    assert rest == [sampler.draw() for _ in range(6)]
    assert sorted(seen + rest) == list(range(10))


def averaged(seed: int) -> State:
    model = net(seed)
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    return {"model": model, "ema": ema}


def test_averaged_copies_keep_their_average_and_count(tmp_path: Path) -> None:
    state, other = averaged(1), averaged(2)
    for _ in range(3):
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.add_(0.5)
        state["ema"].update_parameters(state["model"])
    through_a_checkpoint(tmp_path, state, other)
    assert other["ema"].n_averaged == 3
    for each in (state, other):
        each["ema"].update_parameters(each["model"])
    assert state_hash(state) == state_hash(other)
    plain = {"model": net(3)}
    ckpt.load(tmp_path, plain, select="model.*", strict="ignore-extra")
    assert state_hash(plain) == state_hash({"model": state["model"]})
    with ckpt.open(tmp_path) as checkpoint:
        assert "ema.module.0.weight" in checkpoint


def test_a_plain_copy_of_the_weights_is_not_tied_to_them(tmp_path: Path) -> None:
    model = net(1)
    state: State = {"model": model, "old": copy.deepcopy(model)}
    with torch.no_grad():
        model[0].weight.zero_()
    other: State = {"model": net(2), "old": net(3)}
    through_a_checkpoint(tmp_path, state, other)
    assert state_hash(other) == state_hash(state)
    assert other["model"][0].weight.sum() == 0
    assert other["old"][0].weight.sum() != 0


def every_bit(name: str) -> torch.Tensor:
    """Return many values of a dtype: all of a byte, else random bits and special numbers."""
    dtype = torch_dtypes.BY_NAME[name]
    if name == "bool":
        return torch.tensor([True, False, True]).repeat(5)
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    raw = torch.randint(0, 256, (64 * dtype.itemsize,), dtype=torch.uint8)
    special = torch.tensor([0xFF, 0x7F, 0x80, 0x00, 0x01] * 16 * dtype.itemsize, dtype=torch.uint8)
    return torch.cat([raw, special]).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(torch_dtypes.as_carrier(tensor).reshape(-1).view(torch.uint8).numpy())


def test_every_dtype_comes_back_bit_for_bit_nans_and_all(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state: State = {name: every_bit(name) for name in torch_dtypes.BY_NAME}
    quiet, loud = (
        torch.tensor([n], dtype=torch.int32).view(torch.float32) for n in (0x7FC0DEAD, 0x7F80BEEF)
    )
    state |= {"quiet": quiet, "loud": loud, "zero": torch.tensor(-0.0)}
    other = {
        n: torch.zeros_like(torch_dtypes.as_carrier(t)).view(t.dtype) for n, t in state.items()
    }
    through_a_checkpoint(tmp_path, state, other)
    assert {n: bits(t) for n, t in other.items()} == {n: bits(t) for n, t in state.items()}
    assert len(torch_dtypes.BY_NAME) > 18
    with ckpt.open(tmp_path) as checkpoint:
        for name, tensor in state.items():
            assert bits(checkpoint[name][...]) == bits(tensor), name
    wrong = {**other, "bfloat16": torch.zeros(len(other["bfloat16"]), dtype=torch.float16)}
    with pytest.raises(ckpt.MismatchError, match=r"bfloat16 is float16.*saved is bfloat16"):
        ckpt.load(tmp_path, wrong, strict="ignore")


def test_a_lazy_conjugate_is_saved_as_its_values_and_not_filled(tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j, 3 - 1j])
    ckpt.save(tmp_path, {"t": number.conj(), "u": number.conj().imag}, step=1)
    live = {"t": torch.zeros(2, dtype=torch.complex64), "u": torch.zeros(2)}
    ckpt.load(tmp_path, live)
    assert torch.equal(live["t"], number.conj().resolve_conj())
    assert torch.equal(live["u"], torch.tensor([-2.0, 1.0]))
    with pytest.raises(ckpt.StateError, match="t: a lazy conjugate"):
        ckpt.load(tmp_path, {**live, "t": number.conj()})


class Values:
    """An object whose whole state is one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def test_the_order_and_the_types_of_values_come_back(tmp_path: Path) -> None:
    value = {
        "lru": OrderedDict([("z", torch.ones(2)), ("a", 2)]),
        "by": {"9": 0, "10": {3: 1, 2: 0}},
        "count": Counter("abb"),
        "some": defaultdict(list, {"x": [1]}),
        "size": torch.Size([2]),
        "seen": {1, 2},
        "last": deque([torch.zeros(1), 4], maxlen=2),
    }
    other = Values(None)
    through_a_checkpoint(
        tmp_path, {"v": Values(value), "loose": value["by"]}, {"v": other, "loose": {}}
    )
    assert repr(other.value) == repr(value)
    assert other.value["lru"]["z"] is not value["lru"]["z"]


def test_what_a_caller_holds_is_refilled_in_the_saved_order(tmp_path: Path) -> None:
    state = {"d": {"z": 1, "a": 2}, "q": deque([1, 2], 2), "s": {1}, "b": bytearray(b"ab")}
    live = {"d": OrderedDict(a=0), "q": deque([0], 2), "s": {2, 3}, "b": bytearray(3)}
    before = dict(live)
    through_a_checkpoint(tmp_path, state, live)
    assert all(live[name] is before[name] for name in live)
    assert list(live["d"].items()) == [("z", 1), ("a", 2)]  # type: ignore[attr-defined]
    assert [live["q"], live["s"], live["b"]] == [state["q"], state["s"], state["b"]]


class Hidden(NamedTuple):
    state: torch.Tensor
    count: int


def test_a_tuple_of_tensors_and_values_is_replaced_around_its_tensors(tmp_path: Path) -> None:
    state: State = {"h": (torch.ones(2), 3, (torch.ones(1), "a")), "n": [Hidden(torch.ones(1), 5)]}
    first, inner, second = torch.zeros(2), torch.zeros(1), torch.zeros(1)
    live: State = {"h": (first, 0, (inner, "b")), "n": [Hidden(second, 0)]}
    through_a_checkpoint(tmp_path, state, live)
    assert live["h"][0] is first
    assert live["h"][2][0] is inner
    assert live["n"][0].state is second
    assert repr(live) == repr(state)


def test_a_value_in_a_mapping_that_cannot_change_is_refused_before_any_write(
    tmp_path: Path,
) -> None:
    def state(value: int) -> State:
        return {
            "a": torch.full((2,), value),
            "m": MappingProxyType({"t": torch.ones(1), "k": value}),
        }

    ckpt.save(tmp_path, state(1), step=1)
    ckpt.load(tmp_path, state(1))
    live = state(0)
    with pytest.raises(MismatchError, match=r"m\.k is a plain value inside a mappingproxy"):
        ckpt.load(tmp_path, live)
    assert live["a"].tolist() == [0, 0]
