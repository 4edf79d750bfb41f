"""Modules go on after a restore in the modes in which the last step left them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

from holdfast.ckpt import ModelParts
from holdfast.ckpt.types import Json
from holdfast.elastic.config import Settings
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.tracked.cursor import Cursor
from holdfast.elastic.tracked.modes import ModesOfModules


def built() -> nn.Sequential:
    """Return a net whose first layer is frozen."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    return net


class Ranks:
    """Ranks that end their steps together; each has a module, or stages, and a cursor."""

    def __init__(
        self, *modules: nn.Module | ModelParts, saved: Cursor | None = None, staged: bool = False
    ) -> None:
        self._told: list[Json] = []
        self.cursors = [Cursor(Settings()) for _ in modules]
        for cursor in self.cursors:
            if saved is not None:
                cursor.load_state_dict(saved.state_dict())
        self._modes = [
            ModesOfModules({"net": each}, cursor, gather=self._gather, staged=staged)
            for each, cursor in zip(modules, self.cursors, strict=True)
        ]
        self._barrier = threading.Barrier(len(modules))
        for each in self._modes:
            each.begin()

    @property
    def cursor(self) -> Cursor:
        first = self.cursors[0]
        assert all(each.modes == first.modes for each in self.cursors)
        return first

    def end_step(self) -> None:
        changed = [each.look() for each in self._modes]
        if any(changed):
            with ThreadPoolExecutor(len(self._modes)) as pool:
                list(pool.map(ModesOfModules.keep, self._modes))

    def _gather(self, value: Json) -> list[Json]:
        self._told.append(value)
        self._barrier.wait()
        values = list(self._told)
        if self._barrier.wait() == 0:
            self._told.clear()
        self._barrier.wait()
        return values


def frozen(net: nn.Module) -> list[str]:
    return [name for name, p in net.named_parameters() if not p.requires_grad]


def test_modes_that_a_step_left_come_back() -> None:
    net = built()
    ranks = Ranks(net)
    net[0].weight.requires_grad_(True)
    net[1].eval()
    ranks.end_step()
    again = built()
    second = Ranks(again, saved=ranks.cursor)
    assert frozen(again) == frozen(net) == ["0.bias"]
    assert [part.training for part in again.modules()] == [part.training for part in net.modules()]
    third = built()
    Ranks(third, saved=second.cursor)
    assert frozen(third) == ["0.bias"], "a generation without a step passes them on"


def test_a_module_that_the_script_begins_otherwise_is_the_scripts() -> None:
    net = built()
    ranks = Ranks(net)
    net.requires_grad_(True)
    ranks.end_step()
    edited = built()
    edited[2].requires_grad_(False)
    Ranks(edited, saved=ranks.cursor)
    assert frozen(edited) == ["2.weight", "2.bias"], "the rest is as the last step left it"


def test_what_the_script_now_begins_with_is_no_change_any_more() -> None:
    net = built()
    ranks = Ranks(net)
    net.requires_grad_(True)
    ranks.end_step()
    edited = nn.Sequential(*net)
    second = Ranks(edited, saved=ranks.cursor)
    edited[2].eval()
    second.end_step()
    assert second.cursor.modes == {"net.2.": False}


@pytest.mark.parametrize("module", [built(), nn.Module()])
def test_what_did_not_change_is_not_stored(module: nn.Module) -> None:
    ranks = Ranks(module)
    ranks.end_step()
    assert ranks.cursor.modes == {}


def test_modules_that_came_later_are_no_concern() -> None:
    net = built()
    ranks = Ranks(net)
    net.append(nn.Dropout())
    net[1].eval()
    ranks.end_step()
    again = built()
    Ranks(again, saved=ranks.cursor)
    assert not again[1].training


def test_stages_have_the_modes_of_all_at_any_number_of_ranks() -> None:
    whole = built()
    stages = nn.Sequential(whole[0]), nn.Sequential(nn.Identity(), *whole[1:])
    ranks = Ranks(*stages, staged=True)
    whole[0].weight.requires_grad_(True)
    whole[1].eval()
    ranks.end_step()
    assert ranks.cursor.modes == {"net.0.weight": True, "net.1.": False}
    again = built()
    Ranks(again, saved=ranks.cursor)
    assert frozen(again) == ["0.bias"]
    assert not again[1].training
    one = built()
    both = ModelParts([nn.Sequential(one[0]), nn.Sequential(nn.Identity(), *one[1:])])
    Ranks(both, saved=ranks.cursor, staged=True)
    assert (frozen(one), one[1].training) == (["0.bias"], False)
    whole[0].weight.requires_grad_(False)
    ranks.end_step()
    assert ranks.cursor.modes == {"net.1.": False}


def test_an_evaluation_on_one_rank_is_not_kept() -> None:
    nets = built(), built()
    ranks = Ranks(*nets)
    nets[0].eval()
    nets[0][0].requires_grad_(True)
    nets[1][0].requires_grad_(True)
    ranks.end_step()
    assert ranks.cursor.modes == {"net.0.weight": True, "net.0.bias": True}


@pytest.mark.parametrize("apart", [True, False])
def test_different_modes_under_one_name_in_two_stages_are_refused(apart: bool) -> None:
    stages = built(), built()
    ranks = Ranks(*(stages if apart else [ModelParts(stages)]), staged=True)
    stages[1][1].eval()
    with pytest.raises(ConfigError, match=r"name 'net\.1\.' in several pipeline stages"):
        ranks.end_step()
