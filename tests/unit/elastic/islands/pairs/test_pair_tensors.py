"""The weights of islands that meet in pairs, on one rank."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from holdfast.elastic.islands.pairs.tensors import PairTensors
from holdfast.elastic.islands.tensors import Merge
from holdfast.elastic.sea.settings import Islands, Nesterov
from holdfast.tools.islands.replayed_sea import OneRank

ISLANDS = Islands(
    name="a",
    every=4,
    portions=2,
    overlap=1,
    bits=32,
    outer=Nesterov(1.0, 0.0),
    topology="pairs",
)


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 7))


def _tensors(model: nn.Module) -> PairTensors:
    found = PairTensors({"model": model}, OneRank(), ISLANDS)
    found.begin()
    return found


def _flat(values: object) -> np.ndarray:  # type: ignore[type-arg]
    return np.concatenate([np.asarray(v.detach()).reshape(-1) for v in values])  # type: ignore[attr-defined]


def _trained(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def test_two_islands_meet_in_the_middle_and_own_progress_is_merged_once() -> None:
    models = [_model(0), _model(1)]
    seas = [_tensors(model) for model in models]
    starts = [_flat(model.parameters()) for model in models]
    for model, by in zip(models, (0.25, 0.75), strict=True):
        _trained(model, by)
    sent = [[tensors.encode(portion) for tensors in seas] for portion in range(2)]
    _trained(models[0], 0.125)  # meanwhile it goes on
    for portion, data in enumerate(sent):
        assert len(data[0]) == seas[0].nbytes(portion)
        for number, tensors in enumerate(seas):
            merge = Merge(portion=portion, weights=(1, 1), whole=2, own=number)
            tensors.adopt(merge, data)
    middle = (starts[0] + starts[1]) / 2 + 0.5
    for tensors in seas:
        np.testing.assert_allclose(_flat(tensors.weights.values()), middle, atol=1e-4)
    later = [_flat(model.parameters()) - middle for model in models]
    np.testing.assert_allclose(later[0], 0.125, atol=1e-4)
    np.testing.assert_allclose(later[1], 0, atol=1e-4)


def test_one_that_is_alone_steps_by_its_own_progress() -> None:
    model = _model(0)
    tensors, start = _tensors(model), _flat(model.parameters())
    _trained(model, 0.5)
    for portion in range(2):
        data = tensors.encode(portion)
        tensors.adopt(Merge(portion=portion, weights=(3,), whole=3, own=0), [data])
    np.testing.assert_allclose(_flat(tensors.weights.values()), start + 0.5, atol=1e-6)
    np.testing.assert_allclose(_flat(model.parameters()), start + 0.5, atol=1e-6)


def test_the_last_merge_gives_all_islands_equal_bits_and_no_momentum() -> None:
    models = [_model(seed) for seed in range(3)]
    seas = [_tensors(model) for model in models]
    middle = np.mean([_flat(model.parameters()) for model in models], axis=0)
    for model, by in zip(models, (0.0, 0.3, 0.6), strict=True):
        _trained(model, by)
    for portion in range(2):
        data = [tensors.encode(portion) for tensors in seas]
        for tensors in seas:
            tensors.merge_last(portion, (1, 1, 1), data)
    for tensors in seas:
        tensors.take_weights()
    assert len({tensors.digests(range(2))[0] for tensors in seas}) == 1
    assert len({_flat(model.parameters()).tobytes() for model in models}) == 1
    np.testing.assert_allclose(_flat(models[0].parameters()), middle + 0.3, atol=1e-4)
    assert not _flat(seas[0].momentum.values()).any()
