"""Modules go on after a restore in the modes in which the last step left them."""

from __future__ import annotations

import pytest
from torch import nn

from holdfast.elastic.config import Settings
from holdfast.elastic.tracked.cursor import Cursor
from holdfast.elastic.tracked.modes import ModesOfModules


def built() -> nn.Sequential:
    """Return a net whose first layer is frozen."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    return net


def modes(net: nn.Module, cursor: Cursor) -> ModesOfModules:
    found = ModesOfModules({"net": net}, cursor)
    found.begin()
    return found


def restored(cursor: Cursor, net: nn.Module) -> Cursor:
    """Begin with ``net`` from a saved cursor; return the new one."""
    found = Cursor(Settings())
    found.load_state_dict(cursor.state_dict())
    modes(net, found)
    return found


def frozen(net: nn.Module) -> list[str]:
    return [name for name, p in net.named_parameters() if not p.requires_grad]


def test_modes_that_a_step_left_come_back() -> None:
    net, cursor = built(), Cursor(Settings())
    kept = modes(net, cursor)
    net[0].weight.requires_grad_(True)
    net[1].eval()
    kept.note()
    again = built()
    second = restored(cursor, again)
    assert frozen(again) == frozen(net) == ["0.bias"]
    assert [part.training for part in again.modules()] == [part.training for part in net.modules()]
    third = built()
    restored(second, third)
    assert frozen(third) == ["0.bias"], "a generation without a step passes them on"


def test_a_script_whose_modules_begin_otherwise_counts() -> None:
    net, cursor = built(), Cursor(Settings())
    kept = modes(net, cursor)
    net.requires_grad_(True)
    kept.note()
    edited = built()
    edited[2].requires_grad_(False)
    restored(cursor, edited)
    assert frozen(edited) == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("module", [built(), nn.Module()])
def test_what_did_not_change_is_not_stored(module: nn.Module) -> None:
    cursor = Cursor(Settings())
    modes(module, cursor).note()
    assert cursor.modes is None


def test_modules_that_came_later_are_no_concern() -> None:
    net, cursor = built(), Cursor(Settings())
    kept = modes(net, cursor)
    net.append(nn.Dropout())
    net[1].eval()
    kept.note()
    again = built()
    restored(cursor, again)
    assert not again[1].training
