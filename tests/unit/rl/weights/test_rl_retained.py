"""The versions before the present one are retained, each in its slot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.adapters.rl.policy.policy import parameter_names
from holdfast.adapters.rl.weights.places import VERSIONS, WeightsPlace, candidates, slot_of
from holdfast.adapters.rl.weights.retained import Retained
from holdfast.ckpt.state.flatten import flatten


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_slot_has_the_version_that_was_kept_there_last(count: int) -> None:
    policy, retained = linear(), Retained([linear() for _ in range(count)])
    assert retained.versions.tolist() == [-1] * count
    kept: list[dict[str, torch.Tensor]] = []
    for version in range(7):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1.0)
        kept.append({name: p.detach().clone() for name, p in policy.named_parameters()})
        retained.keep(policy, version=version)
        for known in range(max(0, version - count + 1), version + 1):
            slot = slot_of(known, retained=count)
            assert retained.versions[slot] == known
            for name, parameter in retained.get_submodule(str(slot)).named_parameters():
                assert torch.equal(parameter, kept[known][name])
    assert not any(parameter.requires_grad for parameter in retained.parameters())


def test_it_is_stored_under_the_names_that_places_tell() -> None:
    names = parameter_names(linear())
    stored = flatten({"model": linear(), "retained": Retained([linear(), linear()])})
    places = [
        WeightsPlace(generation=1, step=step, version=5, slot=slot)
        for step, slot in candidates(5, retained=2)
    ]
    assert [place.step for place in places] == [5, 6, 7]
    assert places[0].fqns(names) == [f"model.{name}" for name in names]
    for place in places:
        assert stored.tensors.keys() >= set(place.fqns(names))
    assert places[1].fqns(names)[-1] == VERSIONS
    assert VERSIONS in stored.volatile, "written to between steps"
    assert len(stored.tensors) == 3 * len(names) + 1
