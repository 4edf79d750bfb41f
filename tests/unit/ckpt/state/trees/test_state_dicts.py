"""State that modules and optimizers give through their own ``state_dict()`` is kept or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import ckpt
from holdfast.ckpt.errors import MismatchError, StateError
from holdfast.ckpt.snapshot.change_watch import ChangeWatch
from holdfast.ckpt.state.capture import flatten
from holdfast.ckpt.state.local_boxes import FlatShard


class Base(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.w, self.value = nn.Parameter(torch.full((2,), float(value))), value


class Saving(Base):
    """As quantised layers do: a tensor that is no buffer, added by ``_save_to_state_dict``."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.scale = torch.full((3,), float(value))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.scale = state_dict.pop(f"{prefix}scale")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def given(self) -> Any:
        return self.scale.tolist()


class Overriding(Base):
    def state_dict(self, *args: Any, **how: Any) -> Any:
        found = super().state_dict(*args, **how)
        found[f"{how.get('prefix', '')}count"] = self.value
        return found

    def load_state_dict(self, state_dict: Any, *args: Any, **how: Any) -> Any:
        self.value = state_dict.pop("count")
        return super().load_state_dict(state_dict, *args, **how)

    def given(self) -> Any:
        return self.value


class Narrow(Base):
    """Overrides without the arguments of torch's methods."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return {**super().state_dict(), "count": torch.tensor(self.value)}

    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        self.value = int(state_dict.pop("count"))
        return super().load_state_dict(state_dict)

    def given(self) -> Any:
        return self.value


class Hooked(Base):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.register_state_dict_post_hook(
            lambda module, found, prefix, _: found.update({f"{prefix}v": torch.tensor(self.value)})
        )
        self.register_load_state_dict_pre_hook(
            lambda module, found, prefix, *_: setattr(module, "value", int(found.pop(f"{prefix}v")))
        )

    def given(self) -> Any:
        return self.value


class Gathering(Base):
    """Brings a buffer up to date before a save, and itself after a load."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_state_dict_pre_hook(lambda *_: self.count.fill_(self.value))
        self.register_load_state_dict_post_hook(lambda *_: setattr(self, "value", int(self.count)))

    def given(self) -> Any:
        return self.value


KINDS: list[Callable[[int], Any]] = [Saving, Overriding, Narrow, Hooked, Gathering]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_module_gives_itself_comes_back(kind: Any, tmp_path: Path) -> None:
    state, other = {"m": kind(7)}, {"m": kind(0)}
    ckpt.save(tmp_path, state, step=1)
    assert ckpt.load(tmp_path, other).missing == ()
    assert other["m"].given() == state["m"].given()
    assert other["m"].w.tolist() == [7.0, 7.0]


class Outer(nn.Sequential):
    """Adds an entry of its own to those of the modules inside it, each of which adds some."""

    seen = 1

    def state_dict(self, *args: Any, **how: Any) -> Any:
        return super().state_dict(*args, **how) | {"seen": self.seen}

    def load_state_dict(self, state_dict: Any, *args: Any, **how: Any) -> Any:
        self.seen = state_dict.pop("seen")
        return super().load_state_dict(state_dict, *args, **how)


def test_modules_inside_modules_keep_each_their_own(tmp_path: Path) -> None:
    state, other = (
        Outer(Saving(1), nn.Sequential(Hooked(2))),
        Outer(Saving(0), nn.Sequential(Hooked(0))),
    )
    state.seen = 9
    flat = flatten({"m": state})
    assert flat.values == {
        "m._state_dict": {"seen": 9},
        "m.0._state_dict": {"scale": {"$tensor": "m.0.scale"}},
        "m.1.0._state_dict": {"v": {"$tensor": "m.1.0.v"}},
    }
    assert {"m.0.scale", "m.1.0.v"} <= flat.volatile
    ckpt.save(tmp_path, {"m": state}, step=1)
    ckpt.load(tmp_path, {"m": other})
    assert other.seen == 9
    assert other[0].given() == [1.0] * 3
    assert other[1][0].given() == 2


class Renaming(nn.Module):
    """Gives the halves of its weight under names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(4.0))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}a"], destination[f"{prefix}b"] = self.w.detach().chunk(2)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        halves = [state_dict.pop(f"{prefix}{key}") for key in "ab"]
        self.w.data.copy_(torch.cat(halves))


def test_views_of_parameters_are_not_stored_twice(tmp_path: Path) -> None:
    state, other = Renaming(), Renaming()
    with torch.no_grad():
        state.w += 5
    assert list(flatten({"m": state}).tensors) == ["m.w"]
    assert flatten({"m": state}).values == {}
    ckpt.save(tmp_path, {"m": state}, step=1)
    ckpt.load(tmp_path, {"m": other})
    assert other.w.tolist() == [5.0, 6.0, 7.0, 8.0]


def test_a_module_that_gives_what_it_did_not_when_it_was_saved_is_missed(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"m": Base(1)}, step=1)
    with pytest.raises(MismatchError, match=r"value m\._state_dict was not saved"):
        ckpt.load(tmp_path, {"m": Overriding(0)})
    report = ckpt.load(tmp_path, {"m": Gathering(0)}, strict="ignore-missing")
    assert report.missing == ("m.count",)


def test_a_module_that_gives_an_object_is_refused_by_its_path() -> None:
    module = Overriding(1)
    module.value = object()  # type: ignore[assignment]
    with pytest.raises(StateError, match=r"m\.count: cannot capture a value of type object"):
        flatten({"m": module})


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_model_is_refused_by_the_path_of_its_packed_weight() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model = torch.ao.quantization.quantize_dynamic(layers, {nn.Linear})
    with pytest.raises(StateError, match=r"m\.0\._packed_params"):
        flatten({"m": model})


def test_an_entry_that_no_load_takes_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build(note: int) -> nn.Module:
        module = Base(1)
        module.register_state_dict_post_hook(
            lambda module, found, prefix, _: found.update(note=note)
        )
        return module

    ckpt.save(tmp_path, {"m": build(3)}, step=1)
    with caplog.at_level(logging.WARNING):
        ckpt.load(tmp_path, {"m": build(3)})
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        ckpt.load(tmp_path, {"m": build(4)})
    assert "m: its state_dict() gave note, which its load_state_dict() does not take" in caplog.text


class Packed(Base):
    """As bitsandbytes does: scales that no ``load_state_dict`` takes, its own or copies."""

    def __init__(self, value: int, *, copies: bool) -> None:
        super().__init__(value)
        self.scale, self.copies = torch.full((3,), float(value)), copies

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}w.scale"] = self.scale.clone() if self.copies else self.scale


def test_tensors_that_no_load_takes_are_filled_in_place(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"m": Packed(1, copies=False)}, step=1)
    module = Packed(2, copies=False)
    ckpt.load(tmp_path, {"m": module})
    assert module.scale.tolist() == [1, 1, 1]


def test_a_tensor_that_no_load_takes_and_that_differs_is_refused(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"m": Packed(1, copies=True)}, step=1)
    ckpt.load(tmp_path, {"m": Packed(1, copies=True)})
    with pytest.raises(StateError, match=r"m\.w\.scale: state_dict\(\) of Packed gave it.*differs"):
        ckpt.load(tmp_path, {"m": Packed(2, copies=True)})


def test_a_tensor_that_an_optimizer_gives_and_does_not_take_is_refused(tmp_path: Path) -> None:
    class Forgetful(torch.optim.SGD):
        def __init__(self, module: nn.Module, value: int) -> None:
            super().__init__(module.parameters(), lr=0.1)
            self.extra = torch.full((2,), float(value))

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "extra": self.extra}

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)

    module = Base(1)
    ckpt.save(tmp_path, {"m": module, "o": Forgetful(module, 1)}, step=1)
    ckpt.load(tmp_path, {"m": module, "o": Forgetful(module, 1)})
    with pytest.raises(StateError, match=r"o\.extra: state_dict\(\) of Forgetful gave it"):
        ckpt.load(tmp_path, {"m": module, "o": Forgetful(module, 2)})


def test_torchs_own_wrappers_add_nothing() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = torch.nn.utils.spectral_norm(nn.Linear(2, 2))
    flat = flatten({"m": nn.Sequential(checkpoint_wrapper(module))})
    assert flat.trees == {}


def test_a_second_pass_finds_what_the_module_gives_now() -> None:
    modules = {"m": Hooked(3), "n": Saving(1), "o": Overriding(5)}
    watch = ChangeWatch()
    watch.flatten(modules)
    modules["m"].value, modules["o"].value = 4, 6
    modules["n"].scale = torch.full((3,), 8.0)
    flat, same = watch.flatten(modules)
    assert same
    assert flat.tensors["m.v"].tolist() == 4
    assert flat.tensors["n.scale"].tolist() == [8.0] * 3
    assert flat.values["o._state_dict"] == {"count": 6}


def test_a_second_pass_sees_a_hook_that_was_added() -> None:
    state, watch = trained(torch.optim.AdamW), ChangeWatch()
    watch.flatten(state)
    state["model"].register_state_dict_post_hook(lambda module, found, *_: found.update(n=1))
    state["optimizer"].register_state_dict_post_hook(lambda _, found: {**found, "k": 2})
    flat, same = watch.flatten(state)
    assert not same
    assert flat.values["model._state_dict"] == {"n": 1}
    assert flat.values["optimizer._state_dict"] == {"k": 2}


def test_a_second_pass_sees_an_entry_come_and_go() -> None:
    class Late(Overriding):
        def state_dict(self, *args: Any, **how: Any) -> Any:
            found = super().state_dict(*args, **how)
            return found if self.value else {"w": found["w"]}

    module, watch = Late(0), ChangeWatch()
    assert watch.flatten({"m": module})[0].values == {}
    module.value = 2
    flat, same = watch.flatten({"m": module})
    assert not same
    assert flat.values == {"m._state_dict": {"count": 2}}
    module.value = 0
    assert watch.flatten({"m": module})[0].values == {}


class Counting(torch.optim.AdamW):
    def __init__(self, parameters: Any, **how: Any) -> None:
        super().__init__(parameters, **how)
        self.count = 0

    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        rest = dict(state_dict)
        self.count = rest.pop("count")
        super().load_state_dict(rest)


def trained(kind: Any, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    model = nn.Linear(3, 2, dtype=dtype)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_what_an_optimizer_gives_itself_comes_back(tmp_path: Path) -> None:
    state, other = trained(Counting), trained(Counting)
    state["optimizer"].count = 5
    state["optimizer"].param_groups[0]["lr"] = 0.25
    ckpt.save(tmp_path, state, step=1)
    group = other["optimizer"].param_groups[0]
    ckpt.load(tmp_path, other)
    assert other["optimizer"].count == 5
    assert other["optimizer"].param_groups[0] is group
    assert group["lr"] == 0.25


def test_the_states_of_such_an_optimizer_keep_their_dtype(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        state = trained(Counting, dtype=torch.bfloat16)
        for kept in state["optimizer"].state.values():
            kept["exp_avg"] = kept["exp_avg"].float() + 1 / 3
        return state

    state, other = build(), build()
    ckpt.save(tmp_path, state, step=1)
    ckpt.load(tmp_path, other)
    for mine, theirs in zip(
        state["optimizer"].state.values(), other["optimizer"].state.values(), strict=True
    ):
        assert theirs["exp_avg"].dtype == torch.float32
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])


def test_a_hook_of_an_optimizer_counts(tmp_path: Path) -> None:
    def build(value: int) -> dict[str, Any]:
        state = trained(torch.optim.AdamW)
        noted = state["noted"] = {"value": value}
        state["optimizer"].register_state_dict_post_hook(lambda _, found: {**found, **noted})
        state["optimizer"].register_load_state_dict_pre_hook(
            lambda _, found: noted.update(value=found["value"])
        )
        return state

    state, other = build(4), build(0)
    ckpt.save(tmp_path, state, step=1)
    ckpt.load(tmp_path, other, select=["model.*", "optimizer.*"])
    assert other["noted"] == {"value": 4}


def test_state_that_only_an_optimizers_state_dict_has_is_refused() -> None:
    class Hidden(Counting):
        def state_dict(self) -> Any:
            found = super().state_dict()
            found["state"][1] = {**found["state"][1], "mine": torch.ones(2)}
            return found

    with pytest.raises(StateError, match=r"optimizer: state_dict\(\) of Hidden gives 'mine' in "):
        flatten(trained(Hidden))


def with_lists() -> dict[str, Any]:
    state = trained(torch.optim.SGD)
    for parameter in state["model"].parameters():
        state["optimizer"].state[parameter] = {
            "past": [torch.full_like(parameter, 2.0), torch.tensor(3), 4],
            "nest": {"a": torch.ones(5), "b": (None, 1.5)},
        }
    return state


def test_tensors_in_lists_of_an_optimizers_state_come_back(tmp_path: Path) -> None:
    state, other = with_lists(), trained(torch.optim.SGD)
    assert {"optimizer.state.model.bias.past.0", "optimizer.state.model.bias.nest.a"} <= set(
        flatten(state).tensors
    )
    ckpt.save(tmp_path, state, step=1)
    ckpt.load(tmp_path, other)
    found = other["optimizer"].state[other["model"].bias]
    assert found["past"][0].tolist() == [2.0, 2.0]
    assert found["past"][1:] == [torch.tensor(3), 4]
    assert found["nest"]["a"].tolist() == [1.0] * 5
    assert found["nest"]["b"] == (None, 1.5)


def test_tensors_in_lists_are_found_again_by_a_second_pass() -> None:
    state, watch = trained(torch.optim.SGD), ChangeWatch()
    for parameter in state["model"].parameters():
        state["optimizer"].state[parameter] = {"past": []}
    watch.flatten(state)
    for kept in state["optimizer"].state.values():
        kept["past"].append(torch.ones(2))
    flat, _ = watch.flatten(state)
    assert "optimizer.state.model.bias.past.0" in flat.tensors


def test_lbfgs_of_parts_of_tensors_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.LBFGS([weight])
    with pytest.raises(StateError, match=r"optimizer: LBFGS keeps one history .* part of weight"):
        flatten({"weight": FlatShard(weight, shape=(8,), start=0), "optimizer": optimizer})


def test_lbfgs_goes_on_where_it_was(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), max_iter=3)}

    def step(state: dict[str, Any]) -> list[float]:
        def closure() -> torch.Tensor:
            state["optimizer"].zero_grad()
            loss = (state["model"](torch.eye(2)) - 3).square().sum()
            loss.backward()
            return loss

        state["optimizer"].step(closure)
        return state["model"].weight.tolist()[0]

    state, other = build(), build()
    step(state)
    ckpt.save(tmp_path, state, step=1)
    ckpt.load(tmp_path, other)
    assert step(other) == step(state)
